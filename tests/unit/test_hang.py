"""Who is at fault when a job stands still: tables of what ranks do, and who is blamed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2pstate.agent.hang import (
    Evidence,
    allowed_s,
    is_busy,
    is_starved,
    judge,
    quiet_since,
)
from p2pstate.trace import Doing, Operation, Sample

DDP, TP = "ddp", "tp"


def op(key: str, entered: int, left: int, round_: int = 1, name: str = "allreduce") -> Operation:
    return Operation(key, round_, entered, left, name)


def rank(
    number: int, *operations: Operation, late: float = 5.0, doing: Doing = Doing.STEPPING, **more: object
) -> Evidence:
    base = Evidence(number, 100 + number, 7, doing, 12, 3 * late, late, False, False, "", operations)
    return replace(base, **more)  # type: ignore[arg-type]


def blamed(*ranks: Evidence) -> list[int]:
    return [fault.rank for fault in judge({each.rank: each for each in ranks}, len(ranks)).at_fault]


def test_rank_that_has_not_entered_what_all_others_wait_in_is_at_fault() -> None:
    ranks = [rank(0, op(DDP, 6, 5)), rank(1, op(DDP, 5, 5)), rank(2, op(DDP, 6, 5))]
    (fault,) = judge({each.rank: each for each in ranks}, 3).at_fault
    assert (fault.rank, fault.pid, fault.count) == (1, 101, 7)
    assert "in step 13; ranks 0, 2 wait for it in allreduce" in fault.sentence


def test_rank_that_only_waits_is_never_at_fault_however_late() -> None:
    # 0 waits for 1, which waits for 2 in another group; 3 waits for both
    ranks = [
        rank(0, op(DDP, 6, 5), late=1000),
        rank(1, op(DDP, 5, 5), op(TP, 3, 2), late=1000),
        rank(2, op(DDP, 5, 5), op(TP, 2, 2), late=1.0),
        rank(3, op(DDP, 6, 5), late=1000),
    ]
    assert blamed(*ranks) == [2]


def test_rank_that_is_not_late_yet_is_only_called_slow() -> None:
    ranks = [rank(0, op(DDP, 6, 5), late=9), rank(1, op(DDP, 5, 5), late=0.5)]
    judgement = judge({each.rank: each for each in ranks}, 2)
    assert judgement.at_fault == ()
    assert list(judgement.slow) == [1]
    assert judge({0: ranks[0], 1: replace(ranks[1], lateness=0.1)}, 2).slow == {}


def test_rank_whose_notices_cannot_arrive_because_it_holds_its_lock_is_at_fault() -> None:
    """Operation 5 is over (others have left it), but the thread that notes it on rank 1 does not come to run."""
    ranks = [rank(0, op(DDP, 6, 5)), rank(1, op(DDP, 5, 4)), rank(2, op(DDP, 6, 5))]
    assert blamed(*ranks) == [1]


def test_rank_in_an_operation_that_nobody_has_left_waits() -> None:
    ranks = [rank(0, op(DDP, 6, 5)), rank(1, op(DDP, 5, 5), op(TP, 3, 2)), rank(2, op(DDP, 6, 5), op(TP, 3, 2))]
    assert blamed(*ranks) == []


def test_rank_seen_polling_inside_a_wait_is_not_at_fault() -> None:
    ranks = [rank(0, op(DDP, 6, 5)), rank(1, op(DDP, 5, 4), polling=True)]
    assert blamed(*ranks) == []


def test_all_inside_one_operation_get_new_connections_and_nobody_is_replaced() -> None:
    ranks = {number: rank(number, op(DDP, 6, 5), late=4) for number in range(3)}
    judgement = judge(ranks, 3)
    assert judgement.at_fault == ()
    assert "ranks 0, 1, 2 wait in allreduce" in judgement.stuck
    ranks[1] = replace(ranks[1], lateness=2.0)
    assert judge(ranks, 3).stuck == ""


def test_ranks_that_wait_for_each_other_in_a_circle_get_new_connections() -> None:
    ranks = {0: rank(0, op(DDP, 6, 5), op(TP, 2, 2)), 1: rank(1, op(DDP, 5, 5), op(TP, 3, 2))}
    judgement = judge(ranks, 2)
    assert judgement.at_fault == ()
    assert judgement.stuck


def test_nobody_is_judged_while_a_rank_is_in_a_debugger() -> None:
    ranks = [rank(0, op(DDP, 6, 5), late=99), rank(1, op(DDP, 5, 5), late=99, traced=True)]
    judgement = judge({each.rank: each for each in ranks}, 2)
    assert judgement.at_fault == ()
    assert not judgement.stuck


def test_nobody_is_judged_without_evidence_of_all_ranks() -> None:
    ranks = {0: rank(0, op(DDP, 6, 5)), 1: rank(1, op(DDP, 5, 5))}
    assert judge(ranks, 3).at_fault == ()


def test_two_ranks_that_are_both_waited_for_are_both_at_fault() -> None:
    ranks = [rank(0, op(DDP, 6, 5)), rank(1, op(DDP, 5, 5)), rank(2, op(DDP, 4, 4))]
    assert blamed(*ranks) == [1, 2]


def test_rank_outside_of_a_group_is_not_waited_for_in_it() -> None:
    ranks = [rank(0, op(TP, 6, 5)), rank(1, op(TP, 5, 5)), rank(2, op(DDP, 1, 1))]
    assert blamed(*ranks) == [1]


def test_rank_that_has_not_come_to_the_round_is_waited_for_in_it() -> None:
    meeting = op("join", 1, 0, round_=4, name="meet")
    in_old_round = op("join", 5, 5, round_=3)
    joining = {"doing": Doing.JOINING}
    assert blamed(rank(0, meeting, **joining), rank(1, in_old_round)) == [1]  # type: ignore[arg-type]
    assert blamed(rank(0, meeting, **joining), rank(1, doing=Doing.STARTING)) == [1]  # type: ignore[arg-type]


def test_quiet_rank_that_nobody_waits_for_is_at_fault_much_later() -> None:
    assert blamed(rank(0, late=9), rank(1, late=0)) == []
    assert blamed(rank(0, late=11), rank(1, late=0)) == [0]


def test_messages_between_two_ranks_count_for_these_two_only() -> None:
    # 0 receives from 1, which hangs; 2 has nothing to do with it and computes
    ranks = [rank(0, op("0<-1", 3, 2)), rank(1, op("0<-1", 2, 2)), rank(2, op("2<-1", 1, 1), late=0.1)]
    assert blamed(*ranks) == [1]


def sample(**more: object) -> Sample:
    base = Sample(1, Doing.STEPPING, 9, 1, 0.0, 0.0, 0.0, "", ())
    return replace(base, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "joined", "busy", "known_turn_s", "seconds"),
    [
        ({"turn_s": 0.05}, True, False, 0.0, 3.0),  # the floor
        ({"turn_s": 2.0}, True, False, 0.0, 20.0),  # ten steps
        ({"turn_s": 2.0}, True, True, 0.0, 60.0),  # compiling
        ({"turn_s": 2.0, "doing": Doing.FETCHING}, True, False, 0.0, 100.0),
        ({"turn_s": 0.05, "doing": Doing.BETWEEN}, True, False, 0.0, 15.0),  # rank 0 saves
        ({}, True, False, 0.0, 1800.0),  # the first steps of a run
        ({}, True, False, 0.5, 20.0),  # the first steps of a replacement
        ({"turn_s": 2.0}, False, False, 0.0, 1800.0),  # it builds its model, alone
        ({"turn_s": 2.0, "doing": Doing.JOINING}, True, False, 0.0, 120.0),
        ({"turn_s": 2.0, "doing": Doing.ENDING}, True, False, 0.0, 1800.0),
        ({"turn_s": 2.0, "expected_until": 50.0}, True, True, 0.0, 3.0),  # it has had its time
    ],
)
def test_allowed_time_follows_what_a_rank_does(
    given: dict[str, object], joined: bool, busy: bool, known_turn_s: float, seconds: float
) -> None:
    assert allowed_s(sample(**given), 3.0, joined=joined, busy=busy, known_turn_s=known_turn_s) == seconds


def test_announced_phase_is_quiet_only_from_its_end() -> None:
    announced = sample(expected_until=100.0)
    assert quiet_since(announced, 20.0, now=90.0) == 90.0
    assert quiet_since(announced, 20.0, now=107.0) == 100.0
    assert quiet_since(sample(), 20.0, now=107.0) == 20.0


def test_processor_time_and_input_tell_busy_from_asleep_and_starved() -> None:
    assert is_busy(10.0, cpu_s=9.0, num_io_bytes=0)
    assert is_busy(10.0, cpu_s=0.0, num_io_bytes=100 << 20)
    assert not is_busy(10.0, cpu_s=0.2, num_io_bytes=4096)
    assert is_starved("R", 10.0, cpu_s=0.1)
    assert not is_starved("R", 10.0, cpu_s=5.0)
    assert not is_starved("S", 10.0, cpu_s=0.0)


def test_evidence_survives_its_journey_and_nonsense_is_refused() -> None:
    evidence = rank(3, op(DDP, 6, 5), op(TP, 2, 2, 9), expected="eval")
    assert Evidence.unpack(evidence.pack()) == evidence
    for spoiled in (None, [], [1] * 11, evidence.pack()[:-1], [*evidence.pack()[:-1], [["key", 1]]]):
        with pytest.raises(ValueError, match="must be"):
            Evidence.unpack(spoiled)
