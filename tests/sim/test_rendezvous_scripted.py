"""The real protocol core in a simulated network, under one scripted schedule of faults a test."""

from __future__ import annotations

import pytest
from simulated_runs import (
    run_assumed_dead_but_only_cut_off,
    run_cut_off_while_the_others_go_on_and_die,
    run_misspoken_and_dead,
    run_two_of_three_acceptors_restarted,
    scripted,
)

from rendezvous.faults import Fault
from rendezvous.types import Change


def test_cut_off_member_does_not_go_on_alone_when_all_it_knows_are_proven_dead() -> None:
    simulation = run_cut_off_while_the_others_go_on_and_die()
    assert {m.name for m in simulation.decided[3].members} == {"a", "b", "d"}
    assert simulation.nodes["c"].core.newest == simulation.decided[1]
    assert all(simulation.nodes["c"].core.membership.records[m.key].ended for m in simulation.decided[1].places)


def test_restarted_acceptors_do_not_vote_for_their_predecessors() -> None:
    simulation = run_two_of_three_acceptors_restarted()
    assert list(simulation.decided) == [1, 2]
    assert simulation.nodes["d"].core.newest == simulation.decided[1]


def test_node_assumed_dead_that_comes_back_has_no_part_in_what_follows() -> None:
    simulation = run_assumed_dead_but_only_cut_off()
    assert [m.name for m in simulation.decided[2].members] == ["a"]
    assert "assumed dead: the schedule says so" in simulation.decided[2].reason
    assert simulation.nodes["b"].evicted
    assert simulation.nodes["b"].core.view == simulation.decided[1]
    assert list(simulation.decided) == [1, 2]


def test_member_that_spoke_of_a_view_that_does_not_exist_and_died_is_replaced() -> None:
    simulation = run_misspoken_and_dead()
    assert simulation.coverage["misspoke"] == 1
    assert list(simulation.decided) == [1, 2]
    assert [m.name for m in simulation.decided[2].members] == ["a", "b"]


def test_fencing_command_breaks_a_tie_and_no_more() -> None:
    """Proof of death is enough for two of four; one of three could miss what the other two began with others."""
    crash = [Fault(2.0, "cut", "a,b|c,d"), Fault(2.0, "crash", "c"), Fault(2.0, "crash", "d")]
    tie = scripted(crash, "abcd", 8.0, num_nodes_min=1, fencing_command=True)
    assert {m.name for m in tie.decided[2].members} == {"a", "b"}
    crash = [Fault(2.0, "cut", "a|b,c"), Fault(2.0, "crash", "b"), Fault(2.0, "crash", "c")]
    less = scripted(crash, "abc", 8.0, num_nodes_min=1, fencing_command=True)
    assert list(less.decided) == [1]
    assert all(less.nodes["a"].core.membership.records[m.key].ended for m in less.decided[1].members if m.name != "a")


def test_decision_lost_with_its_proposer_is_adopted_by_the_next_one() -> None:
    simulation = scripted([Fault(2.0, "ambush_crash"), Fault(2.0, "propose", "b")], "abc", 8.0)
    decided = simulation.decided[2]
    assert decided.reason == "the schedule says so"
    assert {n.member.name for n in simulation.live()} == {"b", "c"}
    simulation.check_converged()


def test_minority_waits_and_returns_to_the_run_after_the_partition_heals() -> None:
    simulation = scripted([Fault(2.0, "cut", "a"), Fault(5.0, "heal")], "abc", 5.0)
    lonely = simulation.nodes["a"]
    assert lonely.core.newest == simulation.decided[1]
    assert any("a#" in line and "votes are needed" in line for line in simulation.trace)
    simulation.run_until(8.0)
    assert lonely.evicted


def test_paused_member_accuses_nobody_when_it_wakes() -> None:
    simulation = scripted([Fault(2.0, "pause", "a"), Fault(2.5, "resume", "a")], "abc", 6.0)
    assert list(simulation.decided) == [1]
    assert not any("a#" in line.split(":")[0] and f" {Change.DEAD} " in line for line in simulation.trace)


@pytest.mark.parametrize(
    ("first", "second"), [("b", "a"), ("a", "b"), ("c", "a")], ids=["b then a", "a then b", "c then a"]
)
def test_members_killed_one_after_the_other_leave_the_last_one_going_on(first: str, second: str) -> None:
    simulation = scripted([Fault(2.0, "crash", first), Fault(2.5, "crash", second)], "abc", 6.0, num_nodes_min=1)
    (last,) = simulation.live()
    assert last.core.view is not None
    assert [m.name for m in last.core.view.members] == [last.member.name]


def test_two_of_three_leaving_at_once_still_vote_for_the_view_without_them() -> None:
    simulation = scripted([Fault(2.0, "leave", "a"), Fault(2.0, "leave", "b")], "abc", 5.0, num_nodes_min=1)
    view = simulation.nodes["c"].core.view
    assert view is not None
    assert [m.name for m in view.members] == ["c"]


def test_of_two_live_nodes_with_one_name_the_second_waits_until_the_first_is_gone() -> None:
    schedule = [Fault(2.0, "twin", "b"), Fault(4.0, "crash", "b")]
    simulation = scripted(schedule, "abc", 3.9, num_nodes_min=1, num_nodes_max=3)
    second = simulation.nodes["b'"]
    assert list(simulation.decided) == [1]
    assert not second.views
    assert any("b#4 waits: " in line and "its name is taken by a live member" in line for line in simulation.trace)
    simulation.run_until(6.0)
    assert {m.key for m in second.views[-1].members} == {simulation.nodes[host].member.key for host in ("a", "b'", "c")}
    simulation.check_converged()


def test_node_that_comes_back_when_another_one_has_its_name_is_out() -> None:
    schedule = [Fault(2.0, "cut", "b"), Fault(2.1, "twin", "b"), Fault(6.0, "heal")]
    simulation = scripted(schedule, "abc", 8.0, num_nodes_min=1, num_nodes_max=3)
    assert [host for host, node in simulation.nodes.items() if node.evicted] == ["b"]
    simulation.check_converged()
