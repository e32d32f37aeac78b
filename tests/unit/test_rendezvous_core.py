"""One whole core: other runs, views, verdicts, evictions, quorum."""

from __future__ import annotations

import dataclasses

import pytest
from core_bench import Bench, member, sent, view_of

from rendezvous import events
from rendezvous.effects import Changed, Deliver, Evicted, Installed, JobEnded, Waiting
from rendezvous.messages import (
    AcceptedVote,
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
    Ping,
    Prepare,
    Promise,
    Status,
    Sync,
    TableDigest,
    Update,
    ViewWanted,
)
from rendezvous.types import Verdict
from rendezvous.view_delta import delta_of


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


@pytest.mark.parametrize(("places", "agrees"), [("ab", False), ("abc", True), ("abcd", True), ("abcde", False)])
def test_node_that_was_told_other_sizes_than_the_run_has_says_so_once(places: str, agrees: bool) -> None:
    bench = Bench(num_nodes_min=3, num_nodes_max=4)
    said = [e.reason for e in bench.hear(member("b"), Decided(view_of(places))) if isinstance(e, Waiting)]
    text = f"this run's number of training nodes is {len(places)}, but this node was told --nnodes 3:4"
    assert [text in reason for reason in said] == ([] if agrees else [True])
    later = bench.hear(member("b"), Decided(view_of(places, 2)), nonce="nonce")
    assert not any(isinstance(effect, Waiting) for effect in later)


def test_views_come_in_order_and_old_ones_change_nothing() -> None:
    bench = Bench()
    effects = bench.hear(member("b"), Decided(view_of("ab", 3)))
    assert Installed(view_of("ab", 3), True) in effects
    assert sent(effects, Decided) == sent(effects, DecidedDelta) == [], "who has decided it tells it"
    assert bench.status(member("b")) is Status.ALIVE, "members come with a view that were not known before"
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


def test_member_that_is_fenced_is_evicted_although_it_is_in_the_newest_view() -> None:
    bench = Bench()
    bench.know(member("b"))
    bench.hear(member("b"), Decided(view_of("ab")))
    fenced = Gossip((Update(member("a"), Status.FENCED, 0, "the scheduler says so", True, "b"),))
    (evicted,) = [e for e in bench.hear(member("b"), fenced, nonce="nonce") if isinstance(e, Evicted)]
    assert "counted out while it was not heard from (the scheduler says so)" in evicted.reason


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


@pytest.mark.parametrize("ended", [False, True])
def test_after_the_verdict_nobody_proposes(ended: bool) -> None:
    bench = Bench(num_nodes_min=1)
    bench.know(member("b"), member("c"))
    bench.hear(member("b"), Decided(view_of("abc")))
    if ended:
        bench.step(events.Declare(Verdict(0, "done", member("a").key)))
    gone = Gossip((Update(member("c"), Status.GONE, 0, "", True, "x"),))
    effects = bench.hear(member("b"), gone, nonce="nonce")
    effects += [e for t in range(4) for e in bench.step(events.Tick(), t / 4)]
    assert bool(sent(effects, Prepare)) is not ended


def test_node_that_leaves_proposes_no_more_and_still_votes() -> None:
    bench = Bench()
    bench.know(member("b"))
    bench.hear(member("b"), Decided(view_of("ab")))
    (told,) = sent(bench.step(events.Leave("maintenance")), Gossip)
    assert told[0] == member("b").address
    effects = [e for t in range(40) for e in bench.step(events.Tick(), t / 4)]
    assert sent(effects, Prepare) == []
    ballot = Ballot(1, member("b").key)
    ((_, promise),) = sent(bench.hear(member("b"), Prepare(2, ballot), nonce="nonce"), Promise)
    assert promise.votes


def test_decision_is_told_in_full_to_newcomers_and_as_a_change_to_members() -> None:
    bench = Bench(num_nodes_max=3)
    bench.know(member("b"), member("c"), member("d"))
    bench.hear(member("b"), Decided(view_of("abc")))
    left = Update(member("c"), Status.LEFT, 0, "", True, "c")
    prepare = sent(bench.hear(member("c"), Gossip((left,)), nonce="nonce"), Prepare)[0][1]
    bench.hear(member("d"), Promise(2, prepare.ballot, False, None, {}), nonce="nonce")
    bench.hear(member("b"), Promise(2, prepare.ballot, True, None, {}), nonce="nonce")
    effects = bench.hear(member("b"), AcceptedVote(2, prepare.ballot), nonce="nonce")
    (view,) = [e.view for e in effects if isinstance(e, Installed)]
    assert [m.name for m in view.members] == ["a", "b", "d"]
    assert sent(effects, DecidedDelta) == [(member("b").address, DecidedDelta(delta_of(view_of("abc"), view)))]
    assert sent(effects, Decided) == [(member("d").address, Decided(view))]


def test_application_message_is_delivered_from_members_only() -> None:
    bench = Bench()
    assert not any(isinstance(e, Deliver) for e in bench.hear(member("b"), AppMessage("k", 1)))
    bench.know(member("b"))
    assert Deliver(member("b"), AppMessage("k", 1)) in bench.hear(member("b"), AppMessage("k", 1))


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
