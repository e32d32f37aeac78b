"""Functions that all ranks run between steps, with collectives, and what becomes of other collectives there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from mishaps import NUM_STEPS, Outcome, train

WELL = {"node0": 0, "node1": 0}


@pytest.mark.parametrize("args", [pytest.param((), marks=pytest.mark.slow), ("--fsdp",)], ids=["ddp", "fsdp"])
def test_hook_that_a_fault_interrupts_runs_again_on_all_ranks(
    args: tuple[str, ...], tmp_path: Path, fork_server: dict[str, str], without_mishaps: Callable[..., Outcome]
) -> None:
    """Killed in the middle of a hook, raised in one, and killed in the step after one."""
    undisturbed = without_mishaps(*args)
    mishaps = ["10:2:hook-die", "20:1:hook-odd", "26:3:backward-die"]
    outcome = train(tmp_path / "disturbed", fork_server, *mishaps, args=args)
    assert undisturbed.codes == outcome.codes == WELL, outcome.log_tails
    assert sorted(outcome.replaced()) == [2, 3], outcome.log_tails
    assert outcome.digests == undisturbed.digests
    assert [step for step, _, _ in undisturbed.seen[0]] == list(range(5, NUM_STEPS + 1, 5))
    for rank in (0, 1):  # whose processes have seen all, and nothing that a fault has spoilt
        assert outcome.seen[rank] == undisturbed.seen[rank]
    for rank, first in ((2, 10), (3, 25)):
        assert outcome.seen[rank] == [each for each in undisturbed.seen[rank] if each[0] >= first]


def test_collective_in_the_loops_body_is_refused_with_what_to_do(tmp_path: Path, fork_server: dict[str, str]) -> None:
    outcome = train(tmp_path, fork_server, *(f"7:{rank}:body-reduce" for rank in range(4)))
    assert outcome.codes == {"node0": 1, "node1": 1}, outcome.log_tails
    assert "allreduce between two steps" in outcome.log_tails
    assert "state.every(n, function)" in outcome.log_tails
