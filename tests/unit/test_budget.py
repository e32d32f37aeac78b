"""How often a run may fail: tables of rounds, and which limit ends them."""

from __future__ import annotations

from typing import Any

import pytest

from p2pstate.agent.budget import LONG_ROUND_S, Budget
from p2pstate.agent.job import Job


def budget(**limits: Any) -> Budget:
    numbers: dict[str, Any] = {
        "max_restarts": 1000,
        "max_rounds_without_progress": 5,
        "max_tries_per_step": 20,
        "max_faults_per_hour": 500,
        "give_up_s": 60.0,
    }
    rest: dict[str, Any] = dict.fromkeys(Job.__dataclass_fields__)
    return Budget(Job(**(rest | numbers | limits)))


def begin(of: Budget, *rounds: tuple[float, int]) -> list[str]:
    """What is said at each of ``rounds`` (when, newest committed step), after a first one."""
    of.round_begins(-1, "the run starts", 0.0, first=True)
    return [of.round_begins(step, f"fault at {now:g} s", now, first=False) for now, step in rounds]


@pytest.mark.parametrize(
    ("limits", "rounds", "said"),
    [
        ({}, [(10.0 + n, 7) for n in range(19)], ""),
        ({}, [(10.0 + n, 7) for n in range(20)], "step 8 failed 20 times in a row (--max-tries-per-step 20)"),
        ({}, [(10.0 + n, 7 + n) for n in range(100)], ""),  # there is progress
        ({}, [(10.0 + 15 * n, 7) for n in range(6)], "5 rounds in a row, in 75 s, brought no step beyond 7"),
        ({}, [(10.0 + 5 * n, 7) for n in range(6)], ""),
        (
            {},
            [(10.0 + 2 * LONG_ROUND_S * n, -1) for n in range(20)],
            "",
        ),  # nobody counts steps: a long round is progress
        ({}, [(10.0 + 15 * n, -1) for n in range(5)], "5 rounds in a row, in 70 s, brought no step beyond -1"),
        ({"max_tries_per_step": 3}, [(10.0 + n, -1) for n in range(5)], ""),
        ({"max_tries_per_step": 3}, [(10.0, 3), (11.0, 3), (12.0, 4), (13.0, 4)], ""),
        ({"max_faults_per_hour": 9}, [(30.0 * n, n) for n in range(1, 10)], ""),
        (
            {"max_faults_per_hour": 9},
            [(30.0 * n, n) for n in range(1, 11)],
            "10 faults within an hour (--max-faults-per",
        ),
        ({"max_faults_per_hour": 9}, [(400.0 * n, n) for n in range(1, 100)], ""),
    ],
)
def test_run_is_given_up_when_a_limit_is_passed(
    limits: dict[str, Any], rounds: list[tuple[float, int]], said: str
) -> None:
    *before, last = begin(budget(**limits), *rounds)
    assert not any(before)
    assert last.startswith(said)
    assert bool(last) == bool(said)
    assert not last or last.endswith(f"the last reason was: fault at {rounds[-1][0]:g} s")


def test_node_that_joins_late_does_not_count_what_was_before() -> None:
    late = budget(max_tries_per_step=2)
    assert late.round_begins(30, "a spare steps in", 1000.0, first=True) == ""
    assert late.round_begins(30, "fault", 1001.0, first=False).startswith("step 31 failed 2 times")


def test_workers_are_replaced_up_to_the_limit() -> None:
    few = budget(max_restarts=2)
    assert [few.worker_replaced("killed") for _ in range(3)] == ["", "", "killed; --max-restarts 2 is used up"]
