"""One whole core: joins, strangers, refusals, verdicts, evictions, and who may propose."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from typing import Any

import pytest

from rendezvous import events
from rendezvous.config import Config
from rendezvous.core import Core
from rendezvous.effects import Changed, Deliver, Effect, Evicted, Installed, JobEnded, Send, Waiting
from rendezvous.messages import (
    Ack,
    AppMessage,
    Ballot,
    Beat,
    Decided,
    DecidedDelta,
    Ended,
    Gossip,
    Join,
    JoinRefused,
    Message,
    Ping,
    Prepare,
    Status,
    Sync,
    TableDigest,
    Update,
    ViewWanted,
    Wanted,
)
from rendezvous.types import Change, Member, MemberKey, PassiveApplication, Role, Verdict, View
from rendezvous.view_delta import delta_of
from rendezvous.wire import Envelope


class Oracle(PassiveApplication):
    def progress(self) -> Mapping[str, Any]:
        return {"step": 3}


def member(name: str, incarnation: int = 1, port: int | None = None, **more: Any) -> Member:
    return Member(name, incarnation, f"127.0.0.1:{port or 7000 + ord(name)}", **more)


def view_of(names: str, epoch: int = 1, nonce: str = "nonce") -> View:
    return View(nonce, epoch, 1, tuple(map(member, names)), (), (), "before")


class Bench:
    """Core a; the test speaks for the others and owns the clock."""

    def __init__(self, **config: Any) -> None:
        settings = {"num_nodes_min": 2, "num_nodes_max": 2, **config}
        me = member("a")
        self.core = Core(me, Config("run", "a", me.address, **settings), Oracle(), random.Random(1), 0.0)
        self.now = 0.0

    def step(self, event: events.Event, now: float | None = None) -> list[Effect]:
        self.now = self.now if now is None else now
        return self.core.step(event, self.now)

    def hear(self, sender: Member, message: Message, *, nonce: str = "", run: str = "run", to: int = 1) -> list[Effect]:
        envelope = Envelope(run, nonce, sender.key, sender.address, MemberKey("a", to), message)
        return self.step(events.Received(envelope))

    def know(self, *members: Member) -> None:
        for one in members:
            self.hear(one, Join(one))

    def status(self, one: Member) -> Status:
        return self.core.membership.records[one.key].status


def sent(effects: list[Effect], kind: type[Any]) -> list[tuple[str, Any]]:
    return [(e.address, e.message) for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def test_join_is_answered_with_the_table_and_told_to_the_others() -> None:
    bench = Bench(num_nodes_min=9, num_nodes_max=9)
    bench.know(member("b"))
    effects = bench.hear(member("c"), Join(member("c")))
    ((address, sync),) = sent(effects, Sync)
    assert address == member("c").address
    assert {u.member.name for u in sync.updates} == {"a", "b", "c"}
    assert [address for address, _ in sent(effects, Gossip)] == [member("b").address]


def test_join_that_speaks_for_somebody_else_is_ignored() -> None:
    bench = Bench()
    assert sent(bench.hear(member("b"), Join(member("c"))), Sync) == []
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


def test_lonely_node_reports_its_contacts_after_a_deadline() -> None:
    bench = Bench()
    bench.step(events.Contacts((member("b").address,), ("node9:1: Name or service not known",)))
    reasons = [e.reason for t in range(20) for e in bench.step(events.Tick(), t / 2) if isinstance(e, Waiting)]
    (reason,) = [reason for reason in reasons if reason.startswith("no contact answers")]
    assert member("b").address in reason
    assert "node9:1: Name or service not known" in reason


def test_node_that_lost_the_others_does_not_call_that_a_matter_of_firewalls() -> None:
    bench = Bench()
    bench.step(events.Contacts((member("b").address,)))
    bench.know(member("b"))
    bench.step(events.Tick(), 0.0)
    bench.core.membership.apply(Update(member("b"), Status.GONE, 0, "connection refused", True, "b"), 1.0)
    reasons = [e.reason for t in range(4, 40) for e in bench.step(events.Tick(), t / 2) if isinstance(e, Waiting)]
    assert not bench.core.membership.records[member("b").key].live
    assert not any(reason.startswith("no contact answers") for reason in reasons)


def test_message_of_another_run_changes_nothing() -> None:
    bench = Bench()
    bench.step(events.Tick())
    assert bench.hear(member("b"), Ended(Verdict(1, "", member("b").key)), run="other") == []
    bench.hear(member("b"), Decided(view_of("ab")), nonce="nonce")
    assert bench.hear(member("c"), Decided(view_of("ab", 2)), nonce="foreign") == []
    assert bench.core.num_foreign == 2


def test_node_that_comes_to_another_run_is_told_and_says_so() -> None:
    bench = Bench()
    ((address, refusal),) = sent(bench.hear(member("b"), Join(member("b")), run="other"), JoinRefused)
    assert (address, refusal) == (member("b").address, JoinRefused("run 'run' is at this address, not 'other'"))
    assert not bench.hear(member("b"), refusal, run="other", to=77)
    (waiting,) = bench.hear(member("b"), refusal, run="other", to=bench.core.me.incarnation)
    assert waiting == Waiting("b refuses this node: run 'run' is at this address, not 'other'")
    assert not list(bench.core.membership.others())


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
    assert member("b", 2).key not in bench.core.membership.records


def test_own_name_is_refused_to_others() -> None:
    bench = Bench()
    effects = bench.hear(member("a", 2, 9999), Join(member("a", 2, 9999)))
    assert len(sent(effects, JoinRefused)) == 1


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


def test_views_come_in_order_and_old_ones_change_nothing() -> None:
    bench = Bench()
    assert Installed(view_of("ab", 3), True) in bench.hear(member("b"), Decided(view_of("ab", 3)))
    assert not any(isinstance(e, Installed) for e in bench.hear(member("b"), Decided(view_of("ab", 2)), nonce="nonce"))
    assert bench.core.view == view_of("ab", 3)


def test_view_told_by_what_changed_is_taken_by_who_holds_the_one_before_and_asked_for_by_others() -> None:
    change = DecidedDelta(delta_of(view_of("abc"), view_of("ab", 2)))
    bench = Bench()
    bench.know(member("b"))
    assert sent(bench.hear(member("b"), change), ViewWanted) == [(member("b").address, ViewWanted(0))]
    bench.hear(member("b"), Decided(view_of("abc")))
    (installed,) = [e for e in bench.hear(member("b"), change, nonce="nonce") if isinstance(e, Installed)]
    assert installed.view == view_of("ab", 2)
    assert bench.hear(member("b"), change, nonce="nonce") == []
    misfit = DecidedDelta(dataclasses.replace(change.delta, epoch=3, groups=(((0, 9),), (), ())))
    assert bench.hear(member("b"), misfit, nonce="nonce") == []


def test_candidate_learns_views_without_being_in_them_and_is_not_evicted() -> None:
    bench = Bench()
    effects = bench.hear(member("b"), Decided(view_of("bc", 3)))
    assert Installed(view_of("bc", 3), False) in effects
    assert not any(isinstance(e, Evicted) for e in effects)
    assert bench.core.view is None


def test_member_that_is_missing_in_a_newer_view_is_evicted_once_and_votes_no_more() -> None:
    bench = Bench()
    bench.hear(member("b"), Decided(view_of("abc")))
    effects = bench.hear(member("b"), Decided(view_of("bc", 2)), nonce="nonce")
    assert [e for e in effects if isinstance(e, Evicted)] == [
        Evicted("the run went on without this node (view 2: before)")
    ]
    effects = bench.hear(member("b"), Decided(view_of("bc", 3)), nonce="nonce")
    assert not any(isinstance(e, Evicted) for e in effects)
    assert not bench.core.agreement.is_voter()
    assert not bench.core.quorate()


def test_member_that_is_told_it_is_gone_before_it_learned_its_view_is_evicted() -> None:
    bench = Bench()
    bench.know(member("b"))
    bench.hear(member("b"), Decided(view_of("bc", 2)))
    gone = Update(member("a"), Status.GONE, 0, "not in the view of epoch 2", False, "b")
    effects = bench.hear(member("b"), Gossip((gone,)), nonce="nonce")
    assert Evicted("the run went on without this node (view 2: before)") in effects


def test_heartbeat_with_a_newer_epoch_makes_this_node_ask_and_not_vote() -> None:
    bench = Bench()
    bench.know(member("b"))
    bench.hear(member("b"), Decided(view_of("ab")))
    effects = bench.hear(member("b"), Ping(1, Beat(4, 0)), nonce="nonce")
    assert sent(effects, ViewWanted) == [(member("b").address, ViewWanted(1))]
    assert not bench.core.agreement.is_voter()


def test_heartbeat_with_an_older_epoch_is_answered_with_the_view() -> None:
    bench = Bench()
    bench.know(member("b"))
    bench.hear(member("b"), Decided(view_of("ab", 3)))
    effects = bench.hear(member("b"), Ping(1, Beat(2, 0)), nonce="nonce")
    assert sent(effects, Decided) == [(member("b").address, Decided(view_of("ab", 3)))]


def test_tables_are_exchanged_only_when_they_differ() -> None:
    bench = Bench()
    bench.know(member("b"), member("c"))
    assert bench.hear(member("b"), TableDigest(bench.core.membership.digest)) == []
    ((address, sync),) = sent(bench.hear(member("b"), TableDigest(1)), Sync)
    assert address == member("b").address
    assert sync.reply
    effects = [e for tick in range(40) for e in bench.step(events.Tick(), tick / 4)]
    assert sent(effects, Sync) == []
    assert len(sent(effects, TableDigest)) == 2  # one in sync_interval_s


def test_progress_of_others_is_kept_with_its_time() -> None:
    bench = Bench()
    bench.know(member("b"))
    bench.step(events.Tick(), 4.0)
    bench.hear(member("b"), Ack(99, Beat(0, 0, progress={"step": 12})))
    record = bench.core.members()[member("b").key]
    assert (record.progress, record.progress_s) == ({"step": 12}, 4.0)


def test_first_verdict_counts_is_told_on_and_rides_on_heartbeats() -> None:
    bench = Bench()
    bench.know(member("b"), member("c"))
    first, second = Verdict(0, "done", member("b").key), Verdict(1, "failed", member("c").key)
    effects = bench.hear(member("b"), Ended(first))
    assert [e.verdict for e in effects if isinstance(e, JobEnded)] == [first]
    assert {address for address, _ in sent(effects, Ended)} == {member("b").address, member("c").address}
    assert not any(isinstance(e, JobEnded) for e in bench.hear(member("c"), Ended(second)))
    ((_, ack),) = sent(bench.hear(member("c"), Ping(1, Beat(0, 0))), Ack)
    assert ack.beat.verdict == first


def test_verdict_on_a_heartbeat_is_taken() -> None:
    bench = Bench()
    bench.know(member("b"))
    verdict = Verdict(0, "done", member("b").key)
    assert JobEnded(verdict) in bench.hear(member("b"), Ping(1, Beat(0, 0, verdict=verdict)))


def test_after_the_verdict_nobody_proposes() -> None:
    bench = Bench()
    bench.know(member("b"))
    bench.hear(member("b"), Decided(view_of("ab")))
    bench.step(events.Declare(Verdict(0, "done", member("a").key)))
    bench.hear(member("b"), Gossip((Update(member("b"), Status.GONE, 0, "", True, "x"),)), nonce="nonce")
    effects = [e for t in range(40) for e in bench.step(events.Tick(), t / 4)]
    assert sent(effects, Prepare) == []
    assert not any(isinstance(e, Installed) for e in effects)


def test_application_message_is_delivered_from_members_only() -> None:
    bench = Bench()
    assert not any(isinstance(e, Deliver) for e in bench.hear(member("b"), AppMessage("k", 1)))
    bench.know(member("b"))
    assert Deliver(member("b"), AppMessage("k", 1)) in bench.hear(member("b"), AppMessage("k", 1))


def test_request_of_a_member_leads_to_a_proposal_of_the_first_in_line() -> None:
    bench = Bench()
    bench.know(member("b"))
    bench.hear(member("b"), Decided(view_of("ab")))
    effects = bench.hear(member("b"), Wanted(1, "a worker died"), nonce="nonce")
    assert len(sent(effects, Prepare)) == 1


def test_request_for_an_epoch_that_is_decided_is_answered_with_it() -> None:
    bench = Bench()
    bench.know(member("b"))
    bench.hear(member("b"), Decided(view_of("ab", 3)))
    effects = bench.hear(member("b"), Wanted(2, "a worker died"), nonce="nonce")
    assert sent(effects, Decided) == [(member("b").address, Decided(view_of("ab", 3)))]
    assert sent(effects, Prepare) == []


def test_second_in_line_waits_its_stagger_before_it_proposes() -> None:
    bench = Bench()
    bench.know(member("b"))
    bench.hear(member("b"), Decided(view_of("ba")))
    stagger_s = bench.core.config.timing.stagger_s
    effects = bench.step(events.Propose("a worker died"))
    assert sent(effects, Prepare) == []
    assert sent(effects, Wanted) == [(member("b").address, Wanted(1, "a worker died"))]
    assert sent(bench.step(events.Tick(), stagger_s - 0.01), Prepare) == []
    assert len(sent(bench.step(events.Tick(), stagger_s), Prepare)) == 1


def test_request_is_void_once_an_epoch_is_decided() -> None:
    bench = Bench()
    bench.know(member("b"))
    bench.hear(member("b"), Decided(view_of("ba")))
    bench.step(events.Propose("a worker died"))
    bench.hear(member("b"), Decided(view_of("ba", 2)), nonce="nonce")
    effects = [e for t in range(20) for e in bench.step(events.Tick(), t / 4)]
    assert sent(effects, Wanted) == []


def test_new_member_is_taken_in_after_a_moment_so_that_several_come_together() -> None:
    bench = Bench()
    bench.know(member("b"))
    bench.hear(member("b"), Decided(view_of("ab")))
    bench.know(member("c"))
    assert sent(bench.step(events.Tick(), 0.1), Prepare) == []
    interval_s = bench.core.config.timing.probe_interval_s
    assert sent(bench.step(events.Tick(), interval_s), Prepare)


def start(bench: Bench, until_s: float) -> tuple[list[str], float | None]:
    """Tick until the first proposal; -> (what was waited for, when it came)."""
    reasons: list[str] = []
    for tick in range(int(until_s * 10)):
        effects = bench.step(events.Tick(), tick / 10)
        reasons += [e.reason for e in effects if isinstance(e, Waiting)]
        if sent(effects, Prepare):
            return reasons, tick / 10
    return reasons, None


@pytest.mark.parametrize(
    ("others", "config", "comes_s", "waits_for"),
    [
        ([], {}, None, "1 of 2 training nodes joined: waiting for the others"),
        ([member("b")], {}, 0.0, None),
        ([member("b")], {"num_spares_expected": 1}, 3.0, "2 of 3 nodes joined: last call of 3 s"),
        ([member("b"), member("c")], {"num_spares_expected": 1}, 0.0, None),
        ([member("b")], {"num_nodes_max": 3}, 3.0, "2 of 3 nodes"),
        ([member("b")], {"num_witnesses_expected": 1}, 3.0, "0 of 1 witnesses"),
        ([member("b"), member("w", role=Role.WITNESS, num_workers=0)], {"num_witnesses_expected": 1}, 0.0, None),
    ],
)
def test_first_view_waits_for_everybody_expected_but_not_beyond_the_last_call(
    others: list[Member], config: dict[str, Any], comes_s: float | None, waits_for: str | None
) -> None:
    bench = Bench(first_view_last_call_s=3.0, failure_s=60.0, **config)
    for other in others:
        bench.core.membership.apply(Update(other, Status.ALIVE, 0, "", False, other.name), 0.0)
    reasons, when_s = start(bench, 5.0)
    assert when_s == comes_s
    assert waits_for is None or any(waits_for in reason for reason in reasons)


def test_stranger_turned_away_is_a_hint_while_nodes_are_missing_once() -> None:
    bench = Bench()
    bench.step(events.Tick(), 0.0)
    (waiting,) = bench.step(events.Unauthorised(), 0.1)
    assert isinstance(waiting, Waiting)
    assert waiting.reason.startswith("1 of 2 training nodes joined: waiting for the others; somebody was turned away")
    assert bench.step(events.Unauthorised(), 0.2) == []


def test_rejoining_agent_founds_no_run() -> None:
    bench = Bench(rejoin=True, failure_s=60.0)
    bench.core.membership.apply(Update(member("b"), Status.ALIVE, 0, "", False, "b"), 0.0)
    assert start(bench, 5.0)[1] is None


def test_quorum_is_lost_by_suspicion_and_by_nothing_less() -> None:
    bench = Bench()
    bench.know(member("b"), member("c"))
    assert not bench.core.quorate()
    bench.hear(member("b"), Decided(view_of("abc")))
    assert bench.core.quorate()
    bench.core.membership.judge(member("b").key, Status.SUSPECT, "", 0.0)
    assert bench.core.quorate()
    bench.core.membership.judge(member("c").key, Status.SUSPECT, "", 0.0)
    assert not bench.core.quorate()


def test_assumed_death_lets_a_minority_go_on() -> None:
    bench = Bench(num_nodes_min=1)
    bench.know(member("b"), member("c"))
    bench.hear(member("b"), Decided(view_of("abc")))
    for name in "bc":
        bench.core.membership.judge(member(name).key, Status.DEAD, "silent", 0.0)
    effects = [e for t in range(40) for e in bench.step(events.Tick(), t / 4)]
    assert not any(isinstance(e, Installed) for e in effects)
    effects = [e for name in "bc" for e in bench.step(events.AssumeDead(name, "the scheduler says so"))]
    effects += [e for t in range(40, 60) for e in bench.step(events.Tick(), t / 4)]
    (view,) = [e.view for e in effects if isinstance(e, Installed)]
    assert [m.name for m in view.members] == ["a"]


def test_stall_of_the_loop_counts_against_nobody() -> None:
    bench = Bench(num_nodes_min=1)
    bench.know(member("b"), member("c"))
    bench.hear(member("b"), Decided(view_of("abc")))
    bench.step(events.Tick(), 0.0)
    effects = bench.step(events.Tick(), 60.0)
    assert not any(isinstance(e, Changed) for e in effects)


def test_same_sentence_is_said_once_until_the_next_epoch() -> None:
    bench = Bench()
    first = bench.hear(member("b"), JoinRefused("no"))
    second = bench.hear(member("b"), JoinRefused("no"))
    assert (len(first), len(second)) == (2, 0)  # together with the wait for the first view


def test_next_deadline_is_never_in_the_past_after_a_tick() -> None:
    bench = Bench()
    bench.know(member("b"), member("c"))
    bench.hear(member("b"), Decided(view_of("abc")))
    bench.step(events.Propose("a worker died"))
    now = 0.0
    bench.step(events.Tick(), now)
    for _ in range(300):
        assert bench.core.next_deadline_s() > now
        now = bench.core.next_deadline_s()
        bench.step(events.Tick(), now)
