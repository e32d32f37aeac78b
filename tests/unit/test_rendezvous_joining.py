"""How a node comes in: contacts, introductions, and who is refused."""

from __future__ import annotations

import itertools

import pytest
from core_bench import Bench, member, sent, view_of

from rendezvous import events
from rendezvous.effects import Changed, Waiting
from rendezvous.messages import (
    Ack,
    Ballot,
    Beat,
    Decided,
    Gossip,
    Join,
    JoinRefused,
    Ping,
    Prepare,
    Status,
    Sync,
    Update,
)
from rendezvous.types import Change, Member


def test_join_is_answered_with_the_table_and_told_to_the_others() -> None:
    bench = Bench(num_nodes_min=9, num_nodes_max=9)
    bench.know(member("b"))
    effects = bench.hear(member("c"), Join(member("c")))
    ((address, sync),) = sent(effects, Sync)
    assert address == member("c").address
    assert {u.member.name for u in sync.updates} == {"a", "b", "c"}
    assert [address for address, _ in sent(effects, Gossip)] == [member("b").address]


@pytest.mark.parametrize("sender", [member("b"), member("c", 2), member("c", 1, 9999)])
def test_join_that_speaks_for_somebody_else_is_ignored(sender: Member) -> None:
    bench = Bench()
    assert sent(bench.hear(sender, Join(member("c"))), Sync) == []
    assert member("c").key not in bench.core.membership.records


def test_contacts_are_asked_until_somebody_answers_and_then_those_that_are_missing() -> None:
    bench = Bench()
    contacts = (member("a").address, member("b").address, member("c").address)
    bench.step(events.Contacts(contacts))
    asked = [address for address, _ in sent(bench.step(events.Tick(), 0.0), Join)]
    assert asked == list(contacts[1:])
    bench.know(member("b"))
    asked = [address for address, _ in sent(bench.step(events.Tick(), 1.0), Join)]
    assert asked == [contacts[2]]


@pytest.mark.parametrize("met", [False, True])
def test_contacts_are_asked_at_each_interval_and_more_and_more_seldom_by_who_has_met_somebody(met: bool) -> None:
    bench = Bench(num_nodes_min=9, num_nodes_max=9)
    bench.step(events.Contacts((member("c").address,)))
    asked_s = []
    for tenth in range(200):
        if met:
            bench.know(member("b"))
            bench.core.membership.apply(Update(member("b"), Status.ALIVE, tenth, "", False, "b"), tenth / 10)
        if (member("c").address, Join(bench.core.me)) in sent(bench.step(events.Tick(), tenth / 10), Join):
            asked_s.append(tenth / 10)
    pauses_s = {round(after - before, 1) for before, after in itertools.pairwise(asked_s)}
    timing = bench.core.config.timing
    growing_s = {2 * timing.probe_interval_s, 4 * timing.probe_interval_s, 8 * timing.probe_interval_s}
    assert pauses_s == ({*growing_s, timing.failure_s} if met else {timing.probe_interval_s})


def test_lonely_node_reports_its_contacts_after_a_deadline() -> None:
    bench = Bench()
    bench.step(events.Contacts((member("b").address,), ("node9:1: Name or service not known",)))
    reasons = [e.reason for t in range(20) for e in bench.step(events.Tick(), t / 2) if isinstance(e, Waiting)]
    (reason,) = [reason for reason in reasons if reason.startswith("no contact answers")]
    assert member("b").address in reason
    assert "node9:1: Name or service not known" in reason


def test_node_whose_contacts_cannot_be_found_at_all_says_so() -> None:
    bench = Bench()
    bench.step(events.Contacts((), ("no name can be resolved",)))
    reasons = [e.reason for t in range(20) for e in bench.step(events.Tick(), t / 2) if isinstance(e, Waiting)]
    assert any(reason.startswith("no contact answers (no name can be resolved)") for reason in reasons)


def test_node_that_lost_the_others_does_not_call_that_a_matter_of_firewalls() -> None:
    bench = Bench()
    bench.step(events.Contacts((member("b").address,)))
    bench.know(member("b"))
    bench.step(events.Tick(), 0.0)
    bench.core.membership.apply(Update(member("b"), Status.GONE, 0, "connection refused", True, "b"), 1.0)
    reasons = [e.reason for t in range(4, 40) for e in bench.step(events.Tick(), t / 2) if isinstance(e, Waiting)]
    assert not bench.core.membership.records[member("b").key].live
    assert not any(reason.startswith("no contact answers") for reason in reasons)


def test_message_for_a_predecessor_is_answered_by_an_introduction() -> None:
    bench = Bench()
    bench.know(member("b"))
    effects = bench.hear(member("b"), Prepare(1, Ballot(1, member("b").key)), to=77)
    assert sent(effects, Join) == [(member("b").address, Join(bench.core.me))]
    assert len(effects) == 1


def test_stranger_is_introduced_before_it_is_listened_to() -> None:
    bench = Bench()
    effects = bench.hear(member("b"), Ping(1, Beat(0, 0)))
    assert sent(effects, Join) == [(member("b").address, Join(bench.core.me))]
    assert sent(effects, Ack) == []


def test_introductions_are_not_repeated_before_they_can_have_arrived() -> None:
    bench = Bench()
    again_s = bench.core.config.timing.resend_s
    seen = []
    for now in (0.0, 0.0, again_s / 2, again_s, again_s):
        bench.now = now
        seen.append(len(sent(bench.hear(member("b"), Ping(1, Beat(0, 0))), Join)))
    assert seen == [1, 0, 0, 1, 0]


def test_restarted_agent_at_the_same_address_replaces_its_predecessor() -> None:
    bench = Bench()
    bench.know(member("b"))
    effects = bench.hear(member("b", 2), Join(member("b", 2)))
    assert bench.status(member("b")) is Status.GONE
    assert bench.core.membership.records[member("b").key].proof
    assert bench.status(member("b", 2)) is Status.ALIVE
    assert [e.change.kind for e in effects if isinstance(e, Changed)] == [Change.DEAD, Change.JOINED]


def test_name_of_a_live_member_at_another_address_is_refused() -> None:
    bench = Bench()
    bench.know(member("b"))
    effects = bench.hear(member("b", 2, 9999), Join(member("b", 2, 9999)))
    ((_, refused),) = sent(effects, JoinRefused)
    assert "its name is taken by a live member at 127.0.0.1:7098" in refused.reason
    assert sent(effects, Sync) == []
    assert member("b", 2).key not in bench.core.membership.records


def test_taken_name_of_a_node_that_this_one_asked_itself_is_refused() -> None:
    """It listens at a contact, so others ask it to be taken in, and answers like a member."""
    bench = Bench()
    bench.know(member("b"))
    impostor = member("b", 2, 9999)
    updates = tuple(Update(known, Status.ALIVE, 0, "", False, known.name) for known in (impostor, member("a")))
    table = Sync(updates, None, None, False)
    ((address, refused),) = sent(bench.hear(impostor, table), JoinRefused)
    assert (address, impostor.key in bench.core.membership.records) == (impostor.address, False)
    assert "names must be unique" in refused.reason
    bench.core.membership.judge(member("b").key, Status.DEAD, "silent", 0.0)
    bench.hear(impostor, table)
    assert bench.status(impostor) is Status.ALIVE


def test_name_of_a_silent_member_is_free_once_it_is_taken_for_dead() -> None:
    bench = Bench()
    bench.know(member("b"))
    bench.core.membership.judge(member("b").key, Status.DEAD, "silent", 0.0)
    assert sent(bench.hear(member("b", 2, 9999), Join(member("b", 2, 9999))), Sync)
    assert bench.status(member("b", 2)) is Status.ALIVE


@pytest.mark.parametrize("port", [9999, None])
def test_own_name_is_refused_to_others(port: int | None) -> None:
    bench = Bench()
    effects = bench.hear(member("a", 2, port), Join(member("a", 2, port)))
    assert len(sent(effects, JoinRefused)) == 1
    assert sent(effects, Sync) == []


def test_refused_node_says_why_it_waits_and_not_that_nobody_answers() -> None:
    bench = Bench()
    bench.step(events.Contacts((member("b").address,)))
    effects = bench.hear(member("b"), JoinRefused("the name is taken"))
    assert Waiting("b refuses this node: the name is taken") in effects
    later = [e.reason for t in range(20) for e in bench.step(events.Tick(), t / 2) if isinstance(e, Waiting)]
    assert not any(reason.startswith("no contact answers") for reason in later)


def test_member_that_is_out_is_told_so_and_given_the_newest_view() -> None:
    bench = Bench()
    bench.know(member("b"), member("c"))
    bench.hear(member("b"), Decided(view_of("abc")), nonce="nonce")
    bench.hear(member("b"), Decided(view_of("ab", 2)), nonce="nonce")
    assert bench.status(member("c")) is Status.GONE
    effects = bench.hear(member("c"), Ping(5, Beat(1, 0)), nonce="nonce")
    assert sent(effects, Decided) == [(member("c").address, Decided(view_of("ab", 2)))]
    ((_, ack),) = sent(effects, Ack)
    assert [u.status for u in ack.beat.updates if u.member.name == "c"] == [Status.GONE]
    again = bench.hear(member("c"), Join(member("c")), nonce="nonce")
    assert len(sent(again, JoinRefused)) == 1
    assert sent(again, Decided) == sent(effects, Decided)
    assert [update.status for _, gossip in sent(again, Gossip) for update in gossip.updates] == [Status.GONE]
    assert sent(again, Sync) == []
