"""The acceptor and proposer of one epoch, message by message."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rendezvous.agreement import Agreement
from rendezvous.config import Timing
from rendezvous.effects import Outbox, Send, Waiting
from rendezvous.membership import Membership
from rendezvous.messages import (
    Accept,
    AcceptDelta,
    Accepted,
    AcceptedVote,
    Ballot,
    Decided,
    Message,
    Prepare,
    Promise,
    Reject,
    Status,
    Update,
    ViewWanted,
)
from rendezvous.plain import MAX_COUNTER
from rendezvous.types import Member, MemberKey, View
from rendezvous.view_delta import delta_of
from rendezvous.views import Sizes

TIMING = Timing(1.0, 10.0)


def member(name: str, incarnation: int = 1) -> Member:
    return Member(name, incarnation, f"127.0.0.1:{7000 + ord(name)}")


def view_of(names: str, epoch: int = 1, reason: str = "before") -> View:
    return View("nonce", epoch, 1, tuple(map(member, names)), (), (), reason)


def ballot(number: int, name: str) -> Ballot:
    return Ballot(number, MemberKey(name, 1))


class Decider:
    def __init__(self) -> None:
        self.asked: list[dict[MemberKey, dict[str, Any]]] = []
        self.mine: dict[str, Any] = {"of": "a"}
        self.places: tuple[int, int] | None = None

    def ballot(self) -> dict[str, Any]:
        return self.mine

    def decide(
        self, previous: View | None, places: Sequence[Member], ballots: Mapping[MemberKey, dict[str, Any]]
    ) -> tuple[bool, dict[str, Any]]:
        del previous
        self.asked.append(dict(ballots))
        return False, {"places": len(places)}

    def num_places(self, previous: View, ballots: Mapping[MemberKey, dict[str, Any]]) -> tuple[int, int] | None:
        del previous, ballots
        return self.places


class Bench:
    """Node a in a view; the test speaks for all others."""

    def __init__(self, view: View | None, others: str, *, low: int = 1, high: int = 9, rejoins: bool = False) -> None:
        self.out = Outbox()
        self.membership = Membership(member("a"), self.out, 0.0)
        self.decider = Decider()
        self.learned: list[View] = []
        sizes = Sizes(low, high, 3)
        rng = random.Random(1)
        self.agreement = Agreement(self.membership, sizes, TIMING, rejoins, self.decider, self.learn, rng, self.out)
        if view is not None:
            self.agreement.install(view)
        for name in others:
            self.set(name, Status.ALIVE)
        self.out.drain()

    def set(self, name: str, status: Status, *, proof: bool = False) -> None:
        self.membership.apply(Update(member(name), status, 0, "", proof, name), 0.0)

    def learn(self, view: View, now: float) -> None:
        del now
        self.learned.append(view)
        self.agreement.install(view)

    def hear(self, name: str, message: Message, now: float = 0.0) -> list[tuple[str, Message]]:
        self.agreement.receive(member(name), message, now)
        return self.sent()

    def sent(self) -> list[tuple[str, Message]]:
        return [(e.to.name, e.message) for e in self.out.drain() if isinstance(e, Send) and e.to]

    def propose(self, now: float = 0.0) -> Ballot:
        """Start a ballot; those that end at once are looked at by the tests themselves."""
        self.agreement.propose(lambda _: ["b is dead"], now)
        proposal = self.agreement.proposal
        return proposal.ballot if proposal else Ballot(0, self.membership.me.key)


def promise(number: Ballot, accepted: Accepted | None = None, *, votes: bool = True, epoch: int = 2) -> Promise:
    return Promise(epoch, number, votes, accepted, {"votes": votes})


# -- acceptor -------------------------------------------------------------------------------------------------------


def test_acceptor_promises_then_refuses_lower_ballots() -> None:
    bench = Bench(view_of("abc"), "bc")
    ((to, answer),) = bench.hear("b", Prepare(2, ballot(5, "b")))
    assert (to, answer) == ("b", Promise(2, ballot(5, "b"), True, None, {"of": "a"}))
    assert bench.hear("c", Prepare(2, ballot(4, "c"))) == [("c", Reject(2, ballot(4, "c"), ballot(5, "b")))]
    assert bench.hear("c", Accept(2, ballot(4, "c"), view_of("ac", 2))) == [
        ("c", Reject(2, ballot(4, "c"), ballot(5, "b")))
    ]
    assert bench.agreement.accepted is None


def test_acceptor_tells_what_it_accepted_to_the_next_proposer() -> None:
    bench = Bench(view_of("abc"), "bc")
    value = view_of("ab", 2)
    assert bench.hear("b", Accept(2, ballot(5, "b"), value)) == [("b", AcceptedVote(2, ballot(5, "b")))]
    ((_, answer),) = bench.hear("c", Prepare(2, ballot(6, "c")))
    assert isinstance(answer, Promise)
    assert answer.accepted == Accepted(ballot(5, "b"), value)


def test_what_was_accepted_for_an_epoch_is_no_value_for_the_next_one() -> None:
    bench = Bench(view_of("abc"), "bc")
    value = view_of("abc", 2)
    bench.hear("b", Accept(2, ballot(5, "b"), value))
    bench.agreement.install(value)
    ((_, answer),) = bench.hear("c", Prepare(3, ballot(1, "c")))
    assert answer == Promise(3, ballot(1, "c"), True, None, {"of": "a"})


def test_rejected_proposer_need_not_wait_once_the_epoch_is_decided() -> None:
    bench = Bench(view_of("abc"), "bc")
    number = bench.propose()
    bench.hear("b", Reject(2, number, ballot(7, "b")))
    assert bench.agreement.retry_s > 0
    bench.agreement.install(view_of("abc", 2))
    assert bench.agreement.retry_s == 0


def test_request_that_names_only_what_changes_is_accepted_as_the_whole_view() -> None:
    bench = Bench(view_of("abc"), "bc")
    value = view_of("ab", 2)
    delta = delta_of(view_of("abc"), value)
    assert bench.hear("b", AcceptDelta(2, ballot(5, "b"), delta)) == [("b", AcceptedVote(2, ballot(5, "b")))]
    assert bench.agreement.accepted == Accepted(ballot(5, "b"), value)
    assert bench.hear("b", AcceptDelta(2, ballot(6, "b"), dataclasses.replace(delta, groups=((), ())))) == []
    assert bench.hear("b", AcceptDelta(3, ballot(5, "b"), delta)) == [("b", ViewWanted(1))]


def test_equal_numbers_are_ordered_by_proposer() -> None:
    bench = Bench(view_of("abc"), "bc")
    bench.hear("c", Prepare(2, ballot(5, "c")))
    ((_, answer),) = bench.hear("b", Prepare(2, ballot(5, "b")))
    assert isinstance(answer, Reject)


def test_old_epoch_is_answered_with_the_decision() -> None:
    decided = view_of("abc", 4)
    bench = Bench(decided, "bc")
    assert bench.hear("b", Prepare(4, ballot(9, "b"))) == [("b", Decided(decided))]
    assert bench.hear("b", Accept(3, ballot(9, "b"), view_of("b", 3))) == [("b", Decided(decided))]


def test_epoch_that_is_too_new_is_answered_with_a_question() -> None:
    bench = Bench(view_of("abc", 4), "bc")
    assert bench.hear("b", Prepare(6, ballot(9, "b"))) == [("b", ViewWanted(4))]
    assert bench.agreement.promised is None


@pytest.mark.parametrize("message", [Prepare(0, ballot(9, "b")), Accept(0, ballot(9, "b"), view_of("b"))])
def test_request_for_no_epoch_at_all_harms_no_node_without_a_view(message: Message) -> None:
    assert Bench(None, "b").hear("b", message) == [("b", ViewWanted(0))]


def test_value_of_another_epoch_is_not_accepted() -> None:
    bench = Bench(view_of("abc"), "bc")
    assert bench.hear("b", Accept(2, ballot(5, "b"), view_of("ab", 3))) == []
    assert bench.agreement.accepted is None


@pytest.mark.parametrize("why", ["not in the view", "abstains", "missed a decision", "rejoins"])
def test_non_voter_tells_its_ballot_but_promises_and_accepts_nothing(why: str) -> None:
    bench = Bench(
        {"not in the view": view_of("bc"), "rejoins": None}.get(why, view_of("abc")), "bc", rejoins=why == "rejoins"
    )
    epoch = bench.agreement.epoch + 1
    bench.agreement.abstains = why == "abstains"
    if why == "missed a decision":
        bench.agreement.hear_epoch(member("b").key, 2, 0.0)
    ((_, answer),) = bench.hear("b", Prepare(epoch, ballot(5, "b")))
    assert answer == Promise(epoch, ballot(5, "b"), False, None, {"of": "a"})
    assert bench.hear("b", Accept(epoch, ballot(5, "b"), view_of("ab", epoch))) == []
    assert bench.agreement.promised is None


def say(bench: Bench, name: str, epoch: int, now: float = 0.0) -> None:
    bench.agreement.hear_epoch(member(name).key, epoch, now)


def test_only_the_member_that_spoke_of_a_newer_epoch_can_take_it_back() -> None:
    bench = Bench(view_of("abc"), "bc")
    say(bench, "b", 9)
    say(bench, "c", 1)
    assert not bench.agreement.is_voter()
    say(bench, "b", 1)
    assert bench.agreement.is_voter()
    assert not bench.agreement.missed()


def test_view_that_nobody_shows_keeps_a_node_from_voting_for_the_time_of_a_failure() -> None:
    bench = Bench(view_of("abc"), "bc")
    say(bench, "b", 9)
    say(bench, "b", 10, now=TIMING.failure_s - 0.1)  # saying it again renews nothing
    bench.agreement.tick(TIMING.failure_s - 0.1)
    assert not bench.agreement.is_voter()
    bench.agreement.tick(TIMING.failure_s)
    assert bench.agreement.is_voter()
    number = bench.propose(TIMING.failure_s)
    for name in "bc":
        bench.hear(name, promise(number))
    bench.hear("c", AcceptedVote(2, number))
    assert [view.epoch for view in bench.learned] == [2]
    bench.agreement.install(view_of("abc", 10))
    assert not bench.agreement.missed()


@pytest.mark.parametrize("why", ["a fence", "proof suffices"])
def test_less_than_a_majority_decides_nothing_while_a_newer_view_may_exist(why: str) -> None:
    """Only a majority meets every other one: whoever counts on fewer must have been told of every view."""
    bench = Bench(view_of("abc"), "bcd")
    if why == "proof suffices":
        bench.agreement._sizes = Sizes(1, 9, 3, proof_suffices=True)
    for name in "bc":
        bench.set(name, Status.GONE if why == "proof suffices" else Status.FENCED, proof=True)
    assert bench.agreement.has_quorum({member("a").key})
    say(bench, "d", 9)
    bench.agreement.tick(TIMING.failure_s)
    assert bench.agreement.is_voter()
    assert not bench.agreement.has_quorum({member("a").key})
    bench.propose(TIMING.failure_s)
    bench.out.drain()
    bench.agreement.tick(TIMING.failure_s + TIMING.attempt_s)
    (waiting,) = [e for e in bench.out.drain() if isinstance(e, Waiting)]
    assert "d said that it knows view 9, which nobody shows" in waiting.reason
    assert "`p2prun assume-dead d`" in waiting.reason
    bench.set("d", Status.FENCED, proof=True)
    assert bench.agreement.has_quorum({member("a").key})


def test_tie_with_the_dead_decides_also_after_one_of_them_spoke_of_a_newer_view() -> None:
    bench = Bench(view_of("ab"), "b")
    say(bench, "b", 9)
    bench.set("b", Status.GONE, proof=True)
    bench.agreement.tick(TIMING.failure_s)
    bench.propose(TIMING.failure_s)
    assert [[m.name for m in view.places] for view in bench.learned] == [["a"]]


def test_node_without_a_view_votes_on_no_first_one_until_the_one_who_spoke_of_one_is_fenced() -> None:
    bench = Bench(None, "b")
    assert bench.agreement.is_voter()
    say(bench, "b", 9)
    say(bench, "b", 0)
    bench.agreement.tick(TIMING.failure_s - 0.1)
    assert bench.out.drain() == []
    bench.agreement.tick(TIMING.failure_s)
    assert not bench.agreement.is_voter()
    (waiting,) = [e for e in bench.out.drain() if isinstance(e, Waiting)]
    assert waiting.reason.startswith("b said that it knows view 9, which nobody shows")
    bench.set("b", Status.FENCED, proof=True)
    assert bench.agreement.is_voter()


def test_ballots_of_an_epoch_begin_at_one_whatever_number_another_epoch_reached() -> None:
    bench = Bench(view_of("abc"), "bc")
    bench.hear("b", Prepare(2, ballot(MAX_COUNTER, "b")))
    assert bench.propose().number <= MAX_COUNTER  # what is higher, nobody understands
    bench.agreement.install(view_of("abc", 2))
    assert bench.propose() == ballot(1, "a")


def test_too_long_ballot_of_the_application_is_its_mistake() -> None:
    bench = Bench(view_of("abc"), "bc")
    bench.decider.mine = {"much": b"x" * 70000}
    with pytest.raises(ValueError, match=r"Application.ballot\(\) returned has \d+ bytes"):
        bench.hear("b", Prepare(2, ballot(5, "b")))


# -- proposer -------------------------------------------------------------------------------------------------------


def test_proposer_collects_ballots_plans_and_decides_with_a_majority() -> None:
    bench = Bench(view_of("abc"), "bc")
    number = bench.propose()
    assert sorted(bench.sent()) == [("b", Prepare(2, number)), ("c", Prepare(2, number))]
    assert bench.hear("b", promise(number)) == []  # c lives and may still tell its ballot
    sent = bench.hear("c", promise(number))
    view = bench.agreement.proposal.view if bench.agreement.proposal else None
    assert view is not None
    request = AcceptDelta(2, number, delta_of(view_of("abc"), view))
    assert sorted(to for to, message in sent if message == request) == ["b", "c"]
    assert bench.decider.asked == [{member(n).key: ({"votes": True} if n != "a" else {"of": "a"}) for n in "abc"}]
    bench.hear("b", AcceptedVote(2, number))
    assert bench.learned == [view]
    assert (view.epoch, view.reason, view.data) == (2, "b is dead", {"places": 3})


def test_proposer_goes_on_without_a_slow_member_after_the_collection_time() -> None:
    bench = Bench(view_of("abc"), "bc")
    number = bench.propose()
    bench.hear("b", promise(number))
    bench.agreement.tick(0.9)
    assert bench.agreement.proposal is not None
    assert bench.agreement.proposal.view is None
    bench.agreement.tick(1.0)
    assert bench.agreement.proposal.view is not None


def test_proposer_adopts_the_accepted_value_with_the_highest_ballot() -> None:
    bench = Bench(view_of("abc"), "bc")
    number = bench.propose()
    older, newer = view_of("ab", 2, "older"), view_of("ac", 2, "newer")
    bench.hear("b", promise(number, Accepted(ballot(1, "b"), older)))
    bench.hear("c", promise(number, Accepted(ballot(2, "c"), newer)))
    assert bench.agreement.proposal is not None
    assert bench.agreement.proposal.view is newer
    assert bench.decider.asked == []


def test_promise_of_a_stranger_counts_for_nothing_but_its_ballot() -> None:
    bench = Bench(view_of("abc"), "d")
    number = bench.propose()
    liar = Accepted(ballot(99, "d"), view_of("d", 2))
    bench.hear("d", promise(number, liar))
    bench.agreement.tick(2.0)
    assert bench.agreement.proposal is not None
    assert bench.agreement.proposal.view is None


def test_vote_of_a_stranger_decides_nothing() -> None:
    bench = Bench(view_of("abc"), "bcd")
    number = bench.propose()
    for name in "bcd":
        bench.hear(name, promise(number, votes=name != "d"))
    bench.hear("d", AcceptedVote(2, number))
    assert bench.learned == []


def test_vote_for_another_ballot_decides_nothing() -> None:
    bench = Bench(view_of("abc"), "bc")
    number = bench.propose()
    for name in "bc":
        bench.hear(name, promise(number))
    bench.hear("b", AcceptedVote(2, ballot(number.number + 1, "a")))
    assert bench.learned == []


def test_rejected_proposer_tries_again_later_with_a_higher_number() -> None:
    bench = Bench(view_of("abc"), "bc")
    number = bench.propose()
    bench.hear("b", Reject(2, number, ballot(8, "c")))
    assert bench.agreement.proposal is None
    assert bench.agreement.retry_s > 0.0
    assert bench.propose(5.0) == ballot(9, "a")


def test_lost_requests_are_repeated_to_who_did_not_answer() -> None:
    bench = Bench(view_of("abc"), "bc")
    number = bench.propose()
    bench.sent()
    bench.hear("b", promise(number))
    bench.agreement.tick(0.5)
    assert bench.sent() == [("c", Prepare(2, number))]


def test_first_view_without_quorum_says_that_it_needs_more_than_half_of_the_maximum() -> None:
    bench = Bench(None, "")
    bench.propose()
    bench.out.drain()
    bench.agreement.tick(3.0)
    (waiting,) = [e for e in bench.out.drain() if isinstance(e, Waiting)]
    assert "2 of 3 are needed (--nnodes' MAX" in waiting.reason
    assert "1 came" in waiting.reason
    assert "assume-dead" not in waiting.reason


def test_ballot_without_quorum_is_given_up_with_a_sentence() -> None:
    bench = Bench(view_of("abc"), "bc")
    bench.propose()
    bench.out.drain()
    bench.agreement.tick(3.0)
    (waiting,) = [e for e in bench.out.drain() if isinstance(e, Waiting)]
    assert waiting.reason.startswith("2 of 3 votes are needed and 1 came")
    assert bench.agreement.proposal is None


def test_next_ballot_gets_more_time_where_one_found_no_quorum_in_time() -> None:
    bench = Bench(view_of("abc"), "bc")
    bench.propose()
    bench.agreement.tick(3.0)
    bench.propose(10.0)
    bench.agreement.tick(15.9)
    assert bench.agreement.proposal is not None
    bench.agreement.tick(16.0)
    assert bench.agreement.proposal is None
    bench.agreement.install(view_of("abc", 2))
    bench.propose(20.0)
    bench.agreement.tick(23.0)
    assert bench.agreement.proposal is None


def test_decision_is_left_to_a_live_proposer_for_the_time_of_its_ballot() -> None:
    bench = Bench(view_of("abc"), "bc")
    assert bench.agreement.rival_until_s() == 0.0
    bench.hear("b", Prepare(2, ballot(4, "b")), 1.0)
    assert bench.agreement.rival_until_s() == 4.0
    bench.set("b", Status.GONE, proof=True)
    assert bench.agreement.rival_until_s() == 0.0


def test_places_that_cannot_be_filled_block_until_a_member_changes() -> None:
    bench = Bench(view_of("ab"), "b", low=2, high=2)
    bench.set("b", Status.GONE, proof=True)
    bench.propose()
    (waiting,) = [e for e in bench.out.drain() if isinstance(e, Waiting)]
    assert waiting.reason.startswith("2 of 2 training nodes are needed")
    assert bench.agreement.blocked_at == bench.membership.version
    bench.set("c", Status.ALIVE)
    assert bench.agreement.blocked_at != bench.membership.version


def test_member_taken_for_dead_has_the_time_of_a_probe_to_show_that_it_lives() -> None:
    bench = Bench(view_of("abc"), "bc")
    bench.set("c", Status.DEAD)
    number = bench.propose()
    bench.hear("b", promise(number))
    assert bench.agreement.proposal is not None
    assert bench.agreement.proposal.view is None
    assert bench.agreement.next_deadline_s() == TIMING.probe_timeout_s
    bench.hear("c", promise(number), now=TIMING.probe_timeout_s / 2)
    view = bench.agreement.proposal.view
    assert view is not None
    assert [m.name for m in view.members] == ["a", "b", "c"]

    bench = Bench(view_of("abc"), "bc")
    bench.set("c", Status.DEAD)
    bench.hear("b", promise(bench.propose()))
    bench.agreement.tick(TIMING.probe_timeout_s)
    assert bench.agreement.proposal is not None
    assert bench.agreement.proposal.view is not None
    assert [m.name for m in bench.agreement.proposal.view.members] == ["a", "b"]


def test_application_that_fixes_the_number_of_places_neither_grows_nor_shrinks() -> None:
    bench = Bench(view_of("abc"), "bcd", low=2)
    bench.decider.places = 3, 3
    bench.set("c", Status.GONE, proof=True)
    number = bench.propose()
    for name in "bd":
        bench.hear(name, promise(number, votes=name == "b"))
    assert bench.agreement.proposal is not None
    assert bench.agreement.proposal.view is not None
    assert [m.name for m in bench.agreement.proposal.view.places] == ["a", "b", "d"]

    bench = Bench(view_of("abc"), "b", low=2)
    bench.decider.places = 3, 3
    bench.propose()
    bench.agreement.receive(member("b"), promise(ballot(1, "a")), 0.0)
    (waiting,) = [e for e in bench.out.drain() if isinstance(e, Waiting)]
    assert waiting.reason.startswith("3 of 3 training nodes are needed, 2 are alive and no spare is left")


def test_reasons_that_vanished_until_the_promises_came_end_the_ballot() -> None:
    bench = Bench(view_of("abc"), "bc")
    bench.agreement.propose(lambda _: [], 0.0)
    assert bench.agreement.proposal is not None
    number = bench.agreement.proposal.ballot
    for name in "bc":
        bench.hear(name, promise(number))
    assert bench.agreement.proposal is None
    assert bench.learned == []


def test_silent_member_that_promises_keeps_its_place() -> None:
    bench = Bench(view_of("abc"), "bc")
    bench.set("b", Status.DEAD)
    number = bench.propose()
    for name in "bc":
        bench.hear(name, promise(number))
    assert bench.agreement.proposal is not None
    assert bench.agreement.proposal.view is not None
    assert [m.name for m in bench.agreement.proposal.view.places] == ["a", "b", "c"]


def test_single_survivor_of_two_decides_at_once_when_the_death_is_proven() -> None:
    bench = Bench(view_of("ab"), "b")
    bench.set("b", Status.GONE, proof=True)
    bench.propose()
    assert [[m.name for m in view.places] for view in bench.learned] == [["a"]]


def test_single_survivor_of_two_waits_when_the_other_is_only_silent() -> None:
    bench = Bench(view_of("ab"), "b")
    bench.set("b", Status.DEAD)
    bench.propose()
    bench.agreement.tick(2.0)
    assert bench.learned == []


def test_next_deadline_is_never_in_the_past_after_a_tick() -> None:
    bench = Bench(view_of("abc"), "bc")
    bench.propose()
    now = 0.0
    while bench.agreement.proposal is not None:
        assert bench.agreement.next_deadline_s() > now
        now = bench.agreement.next_deadline_s()
        bench.agreement.tick(now)
    assert now == TIMING.attempt_s
