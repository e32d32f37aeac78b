"""What the operator decides, from values alone: tables of situations, and invariants over random ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pstate.operator.decide import JOIN_GRACE_S, backoff_s, decide
from p2pstate.operator.types import (
    Attempt,
    CreatePod,
    Decision,
    DeletePod,
    Host,
    Observed,
    Phase,
    Pod,
    Quarantine,
    Quarantined,
    QuarantineRule,
    QuarantineWay,
    Record,
    Spec,
    WriteGone,
)

NOW_S = 1_800_000_000.0
SPEC = Spec("default", "train", "u", 1, 2, 1, 1, ("train.py",), "key", container={"image": "i"})
FOUNDED = Record(Phase.RUNNING, attempt=Attempt(1, 3, next_pod=3, founded=True))


def pod(number: int, **known: Any) -> Pod:
    """One that has joined long ago, unless told otherwise."""
    given = {"joined": True, "created_s": NOW_S - 1000, "host": f"host{number}"} | known
    return Pod(f"train-1-{number}", f"uid{number}", 1, number, **given)


def ended(number: int, code: int, ago_s: float = 1.0, **known: Any) -> Pod:
    return pod(number, joined=False, ended_s=NOW_S - ago_s, exit_code=code, **known)


def deciding(*pods: Pod, spec: Spec = SPEC, record: Record = FOUNDED, **seen: Any) -> Decision:
    return decide(spec, record, Observed(NOW_S, tuple(pods), **seen))


def created(decision: Decision) -> list[int]:
    return [action.number for action in decision.actions if isinstance(action, CreatePod)]


def deleted(decision: Decision) -> list[str]:
    return [action.name for action in decision.actions if isinstance(action, DeletePod)]


def page(**known: Any) -> dict[str, Any]:
    return {"waiting": [], "weaknesses": [], "nodes": [], "ranks": [], **known}


def test_new_run_is_recorded_before_its_first_pods_are_made() -> None:
    first = deciding(record=Record())
    assert (first.actions, first.record.attempt) == ((), Attempt(1, 3))
    second = deciding(record=first.record)
    assert created(second) == [0, 1, 2]
    assert second.record.attempt == Attempt(1, 3, next_pod=3)


def test_whole_run_needs_nothing() -> None:
    decision = deciding(pod(0), pod(1), pod(2))
    assert decision == Decision(FOUNDED)


@pytest.mark.parametrize("code", [75, 76, 78, 134, 137, 143])
def test_pod_that_ended_is_replaced_under_a_new_number(code: int) -> None:
    decision = deciding(ended(0, code), pod(1), pod(2))
    assert created(decision) == [3]
    assert decision.record.phase is Phase.RUNNING


@pytest.mark.parametrize(("code", "phase"), [(0, Phase.SUCCEEDED), (1, Phase.FAILED), (77, Phase.FAILED)])
def test_exit_codes_of_the_whole_run_end_it(code: int, phase: Phase) -> None:
    decision = deciding(ended(0, code), pod(1), pod(2))
    assert (decision.record.phase, created(decision), deleted(decision)) == (phase, [], [])
    late = deciding(ended(0, code, ago_s=60), pod(1), pod(2), record=decision.record)
    assert deleted(late) == ["train-1-1", "train-1-2"]


def test_all_stopped_ends_the_run_but_a_drained_cluster_starts_it_again() -> None:
    assert deciding(ended(0, 143), ended(1, 143)).record.phase is Phase.STOPPED
    drained = deciding(ended(0, 143, disrupted=True), ended(1, 143, disrupted=True))
    assert drained.record.phase is Phase.RESTARTING


def test_pods_that_somebody_deletes_have_not_stopped_the_run() -> None:
    """A pod that is being deleted ends with the exit code of `p2prun stop`, and is there for a moment more."""
    deleted = {"leave_by_s": NOW_S + 60}
    decision = deciding(ended(0, 143, **deleted), ended(1, 143, **deleted), ended(2, 143, **deleted))
    assert decision.record.phase is Phase.RESTARTING


def test_run_whose_pods_do_not_start_says_why() -> None:
    record = Record(Phase.PENDING, attempt=Attempt(1, 3, next_pod=3))
    pods = [pod(0, joined=False), pod(1, joined=False, held_up="ErrImagePull: no such image")]
    decision = deciding(*pods, pod(2, joined=False), record=record)
    assert decision.record.message == "pod train-1-1: ErrImagePull: no such image"


def test_all_ended_starts_another_attempt_after_a_while() -> None:
    over = deciding(ended(0, 75), ended(1, 75, message="no spare came"))
    assert over.record.phase is Phase.RESTARTING
    assert "no spare came" in over.record.message
    assert created(deciding(ended(0, 75), ended(1, 75), record=over.record)) == []
    later = deciding(ended(0, 75, backoff_s(1)), ended(1, 75, backoff_s(1)), record=over.record)
    assert (later.record.phase, later.record.num_restarts) == (Phase.PENDING, 1)
    assert later.record.attempt == Attempt(2, 3)


def test_restarts_are_counted() -> None:
    decision = deciding(ended(0, 75), spec=replace(SPEC, max_restarts=4), record=replace(FOUNDED, num_restarts=4))
    assert decision.record.phase is Phase.FAILED
    assert "maxRestarts (4)" in decision.record.message


def test_all_pods_removed_by_hand_starts_another_attempt() -> None:
    assert deciding().record.phase is Phase.RESTARTING


def test_pods_out_of_reach_are_replaced_by_fewer_than_found_a_run() -> None:
    away = [pod(number, leave_by_s=NOW_S - 500) for number in range(3)]
    first = deciding(*away)
    assert created(first) == [3]  # two would be more than half of three
    assert created(deciding(*away, pod(3, joined=False), record=first.record)) == []
    assert first.record.phase is not Phase.RESTARTING


def test_joined_pods_do_not_count_against_further_ones() -> None:
    assert created(deciding(pod(0, leave_by_s=NOW_S - 500), ended(1, 137), pod(2), pod(3))) == [4]


def test_single_node_out_of_reach_is_not_started_twice() -> None:
    single = replace(SPEC, num_nodes=1, num_spares=0)
    record = Record(Phase.RUNNING, attempt=Attempt(1, 1, next_pod=1, founded=True))
    assert deciding(pod(0, leave_by_s=NOW_S - 9000), spec=single, record=record).actions == ()


def test_last_member_gone_waits_until_a_joining_pod_may_have_told_that_it_joined() -> None:
    joining = pod(3, joined=False)
    first = deciding(ended(0, 137), ended(1, 137), joining)
    assert (first.record.phase, created(first), deleted(first)) == (Phase.RUNNING, [], [])
    attempt = replace(first.record.attempt, over_s=NOW_S - JOIN_GRACE_S)  # type: ignore[arg-type]
    told = deciding(
        ended(0, 137), ended(1, 137), replace(joining, joined=True), record=replace(FOUNDED, attempt=attempt)
    )
    assert told.record.phase is Phase.RUNNING
    over = deciding(ended(0, 137), ended(1, 137), joining, record=replace(FOUNDED, attempt=attempt))
    assert over.record.phase is Phase.RESTARTING
    assert deleted(deciding(ended(0, 137), ended(1, 137), joining, record=over.record)) == ["train-1-3"]


def test_quick_failures_are_replaced_more_and_more_slowly() -> None:
    starting = Record(attempt=Attempt(1, 3, next_pod=5))
    quick = [ended(number, 78, ago_s=15, created_s=NOW_S - 20) for number in (0, 1)]
    waiting = [pod(number, joined=False, created_s=NOW_S - 20) for number in (2, 3)]
    assert created(deciding(*quick[:1], *waiting, record=starting)) == [5]
    assert created(deciding(*quick, *waiting, record=starting)) == []


def test_suspended_run_is_asked_to_leave_and_goes_on_as_another_attempt() -> None:
    paused = replace(SPEC, suspended=True)
    decision = deciding(pod(0), pod(1), spec=paused)
    assert (deleted(decision), decision.record.phase) == (["train-1-0", "train-1-1"], Phase.SUSPENDED)
    leaving = [pod(0, leave_by_s=NOW_S + 60)]
    assert deciding(*leaving, record=decision.record).record.attempt == FOUNDED.attempt
    resumed = deciding(record=decision.record)
    assert (resumed.record.attempt, resumed.record.num_restarts) == (Attempt(2, 3), 0)


def test_fewer_spares_give_up_only_what_the_run_calls_a_spare() -> None:
    lean = replace(SPEC, num_spares=0)
    nodes = [{"name": "train-1-0", "part": "spare"}, {"name": "train-1-1", "part": "training"}]
    assert deleted(deciding(pod(0), pod(1), pod(2), spec=lean, page=page(nodes=nodes))) == ["train-1-0"]
    assert deleted(deciding(pod(0), pod(1), pod(2), spec=lean)) == []


def test_fewer_spares_give_up_first_what_has_not_started() -> None:
    lean = replace(SPEC, num_spares=0)
    never_placed = pod(3, joined=False, host=None, held_up="cannot be placed on a host: no room")
    assert deleted(deciding(pod(0), pod(1), never_placed, spec=lean)) == ["train-1-3"]
    joining = pod(3, joined=False)  # may have become a training node just now
    assert deleted(deciding(pod(0), pod(1), joining, spec=lean)) == []


def test_spares_taken_back_before_the_first_view_do_not_keep_it_from_coming() -> None:
    lean = replace(SPEC, num_nodes=1, num_spares=0)
    starting = Record(attempt=Attempt(1, 4, next_pod=4))  # three of four found it
    waiting = [pod(number, joined=False, host=None) for number in range(3)]
    asked = deciding(*waiting, spec=lean, record=starting)
    assert (len(deleted(asked)), asked.record.attempt) == (3, starting.attempt)
    away = pod(0, joined=False, leave_by_s=NOW_S - 500)  # may still be running
    stuck = deciding(away, spec=lean, record=asked.record)
    assert stuck.record.attempt == starting.attempt
    assert "train-1-0 on host0" in stuck.record.message
    assert deciding(spec=lean, record=asked.record).record.attempt == Attempt(2, 1)


def test_last_members_out_of_reach_are_named_with_what_to_do() -> None:
    decision = deciding(ended(0, 137), pod(1, leave_by_s=NOW_S - 500), pod(2, joined=False))
    assert decision.record.phase is Phase.WAITING
    assert "train-1-1 on host1. Its host is out of reach" in decision.record.message
    assert deciding(pod(0), pod(1, leave_by_s=NOW_S - 500)).record.phase is Phase.RUNNING


def test_run_that_has_lost_its_status_goes_on_with_the_pods_that_are_there() -> None:
    there = [replace(pod(number), attempt=3) for number in (4, 6)]
    adopted = deciding(*there, record=Record())
    assert adopted.record.attempt == Attempt(3, 3, next_pod=7)
    assert deleted(deciding(*there, record=adopted.record)) == []


def test_more_spares_come_without_another_attempt() -> None:
    decision = deciding(pod(0), pod(1), pod(2), spec=replace(SPEC, num_spares=2))
    assert created(decision) == [3]
    assert decision.record.attempt == Attempt(1, 3, next_pod=4, founded=True)


def test_waiting_run_says_what_for() -> None:
    decision = deciding(pod(0), page=page(waiting=["for a node in place of b"]))
    assert (decision.record.phase, decision.record.message) == (Phase.WAITING, "for a node in place of b")


def test_gone_are_pods_that_ended_or_were_removed_and_not_those_out_of_reach() -> None:
    decision = deciding(ended(1, 137, ago_s=10), pod(2, leave_by_s=NOW_S - 500), pod(3), pod(4))
    (told,) = (action.entries for action in decision.actions if isinstance(action, WriteGone))
    assert told == {"train-1-0": NOW_S * 1e6, "train-1-1": (NOW_S - 10) * 1e6}
    again = deciding(ended(1, 137, ago_s=10), pod(2, leave_by_s=NOW_S - 500), pod(3), pod(4), gone=told)
    assert not any(isinstance(action, WriteGone) for action in again.actions)


def failing(count: int, host: str = "bad", code: int = 76) -> list[Pod]:
    return [ended(number, code, ago_s=1000 - number, host=host) for number in range(10, 10 + count)]


def test_host_on_which_nodes_failed_again_and_again_is_marked_once() -> None:
    assert not any(isinstance(action, Quarantine) for action in deciding(pod(0), pod(1), pod(2), *failing(2)).actions)
    decision = deciding(pod(0), pod(1), pod(2), *failing(3))
    assert Quarantine("bad", QuarantineWay.TAINT) in decision.actions
    assert decision.record.quarantined == (Quarantined("bad"),)
    unseen = deciding(pod(0), pod(1), pod(2), *failing(3), record=decision.record, hosts=(Host("bad", False),))
    assert Quarantine("bad", QuarantineWay.TAINT) in unseen.actions  # the operator ended before it did so
    seen = deciding(pod(0), pod(1), pod(2), *failing(3), record=decision.record, hosts=(Host("bad", True),))
    assert seen.record.quarantined == (Quarantined("bad", applied=True),)
    assert not any(isinstance(action, Quarantine) for action in seen.actions)
    lifted = deciding(pod(0), pod(1), pod(2), *failing(3), record=seen.record, hosts=(Host("bad", False),))
    assert lifted.record.quarantined == ()
    assert not any(isinstance(action, Quarantine) for action in lifted.actions)


def test_script_that_fails_everywhere_empties_no_cluster() -> None:
    pods = [ended(number, 139, ago_s=1000, host=f"h{number % 5}") for number in range(10, 40)]
    decision = deciding(pod(0), pod(1), pod(2), *pods)
    assert sum(isinstance(action, Quarantine) for action in decision.actions) == SPEC.quarantine.max_hosts


@pytest.mark.parametrize(
    "known", [{"reason": "OOMKilled", "code": 137}, {"disrupted": True, "code": 137}, {"code": 75}]
)
def test_ends_that_are_not_the_hosts_fault_do_not_count(known: dict[str, Any]) -> None:
    code = known.pop("code")
    pods = [ended(number, code, ago_s=1000, host="good", **known) for number in range(10, 15)]
    assert deciding(pod(0), pod(1), pod(2), *pods).record.failures == ()


def test_no_quarantine_where_the_user_wants_none() -> None:
    calm = replace(SPEC, quarantine=QuarantineRule(way=QuarantineWay.NONE))
    assert not any(
        isinstance(each, Quarantine) for each in deciding(pod(0), pod(1), pod(2), *failing(5), spec=calm).actions
    )


STATES = st.fixed_dictionaries(
    {},
    optional={
        "joined": st.booleans(),
        "leave_by_s": st.sampled_from([NOW_S - 500, NOW_S + 60]),
        "ended_s": st.sampled_from([NOW_S - 500, NOW_S - 1]),
        "exit_code": st.sampled_from([0, 1, 75, 76, 77, 78, 137, 143]),
    },
)


@given(
    st.lists(STATES, max_size=9),
    st.integers(1, 5),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from(Phase),
)
def test_any_state_gives_a_decision_that_cannot_found_a_second_run(
    states: list[dict[str, Any]], num_nodes: int, num_spares: int, founded: bool, phase: Phase
) -> None:
    spec = replace(SPEC, num_nodes=num_nodes, num_spares=num_spares)
    pods = [pod(number, **state) for number, state in enumerate(states)]
    attempt = Attempt(1, spec.num_pods, next_pod=len(pods), founded=founded)
    record = Record(phase, attempt=attempt)
    decision = deciding(*pods, spec=spec, record=record)
    founded = founded or any(each.joined for each in pods)
    outside = sum(not each.ended and not each.joined for each in pods)
    if founded and (numbers := created(decision)):
        assert outside + len(numbers) < attempt.first_view_size
        assert min(numbers) >= len(pods)
    following = decision.record.attempt
    assert following is not None
    if following.number > attempt.number:
        assert not any(each.joined and not each.ended for each in pods)
    if phase.final:
        assert created(decision) == []
        assert decision.record.phase is phase
