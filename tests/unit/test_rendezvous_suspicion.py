"""When a suspect is dead: the table of the rule, and the clock around it."""

from __future__ import annotations

import pytest

from rendezvous.suspicion import Suspicion, num_expected_confirmations, suspicion_timeout_s


@pytest.mark.parametrize(
    ("num_confirmations", "num_expected", "timeout_s"),
    [
        (0, 3, 30.0),
        (1, 3, 16.0),
        (2, 3, 7.810),
        (3, 3, 2.0),
        (4, 3, 2.0),
        (10, 3, 2.0),
        (0, 0, 30.0),
        (5, 0, 30.0),
    ],
)
def test_timeout_falls_with_the_logarithm_of_confirmations(
    num_confirmations: int, num_expected: int, timeout_s: float
) -> None:
    assert suspicion_timeout_s(num_confirmations, num_expected, 2.0, 30.0) == pytest.approx(timeout_s, abs=1e-3)


@pytest.mark.parametrize(("num_live", "expected"), [(1, 0), (2, 0), (3, 1), (4, 2), (5, 3), (100, 3)])
def test_expected_confirmations_leave_out_suspect_and_first_accuser(num_live: int, expected: int) -> None:
    assert num_expected_confirmations(num_live) == expected


def test_second_accuser_brings_the_deadline_forward_and_a_repeated_one_does_not() -> None:
    suspicion = Suspicion(100.0, {"a"})
    assert suspicion.deadline_s(5, 2.0, 30.0) == 130.0
    suspicion.accusers.add("a")
    assert suspicion.deadline_s(5, 2.0, 30.0) == 130.0
    suspicion.accusers.add("b")
    assert suspicion.deadline_s(5, 2.0, 30.0) == pytest.approx(116.0)


def test_stall_of_the_judge_moves_the_deadline_by_its_length() -> None:
    suspicion = Suspicion(100.0, {"a"})
    suspicion.postpone(7.0)
    assert suspicion.deadline_s(2, 2.0, 30.0) == 137.0
