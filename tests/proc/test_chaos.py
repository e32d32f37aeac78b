"""Random faults, seeded: workers and nodes are killed, stopped, asked to go, cut off and their copies damaged, at
random moments and in chosen phases, and the final bits stay the same.

The short version is part of the suite; `-m soak` runs many seeds, and as many with networks that lose packets. A
failing seed is in the test's name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
from random_faults import NUM_RANKS, ON_LOOPBACK, PARALLELISMS, PROCESSES, train

from namespaces import why_not
from outcome import compare

WITH_PARTITIONS = (*ON_LOOPBACK, "partition", "partition")
IN_NAMESPACES = (*PROCESSES, "cut", "cut", "links", "links", "deaf", "deaf", "deaf_links", "deaf_links")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, fork_server: dict[str, str]) -> Callable[[str], Path]:
    """Of a parallelism: where the outcome of an undisturbed run is, once for all tests here."""

    @cache
    def outcome(parallelism: str) -> Path:
        return train(tmp_path_factory.mktemp(f"undisturbed-{parallelism}"), parallelism, fork_server)[0]

    return outcome


def check(
    seed: int,
    undisturbed: Callable[[str], Path],
    tmp_path: Path,
    environ: dict[str, str],
    kinds: Sequence[str] = ON_LOOPBACK,
    *,
    namespaces: bool = False,
) -> None:
    parallelism = sorted(PARALLELISMS)[seed % 2]
    out, injected = train(tmp_path, parallelism, environ, seed, kinds, namespaces=namespaces)
    print(f"seed {seed}, {parallelism}, {len(injected)} faults:", *injected, sep="\n  ")
    comparison = compare(out, undisturbed(parallelism), NUM_RANKS)
    assert comparison.identical, "\n".join([parallelism, *injected, *comparison.differences])
    assert injected


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_random_faults_end_bit_identical(
    seed: int, undisturbed: Callable[[str], Path], tmp_path: Path, fork_server: dict[str, str]
) -> None:
    check(seed, undisturbed, tmp_path, fork_server)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 130))
def test_many_random_faults_end_bit_identical(
    seed: int, undisturbed: Callable[[str], Path], tmp_path: Path, fork_server: dict[str, str]
) -> None:
    check(seed, undisturbed, tmp_path, fork_server, WITH_PARTITIONS)


@pytest.mark.soak
@pytest.mark.netns
@pytest.mark.parametrize("seed", range(200, 230))
def test_random_faults_of_processes_and_of_networks_end_bit_identical(
    seed: int, undisturbed: Callable[[str], Path], tmp_path: Path, fork_server: dict[str, str]
) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    environ = {**fork_server, "P2PSTATE_FORKSERVER": ""}  # it is outside of the namespaces
    check(seed, undisturbed, tmp_path, environ, IN_NAMESPACES, namespaces=True)
