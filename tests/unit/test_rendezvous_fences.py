"""Whose death somebody outside vouches for: when it is asked about, what an answer does, what an operator is told."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from rendezvous.agreement import Agreement
from rendezvous.config import Timing
from rendezvous.effects import AskFence, Forget, Outbox, Waiting
from rendezvous.events import AssumeDead, FenceAnswered
from rendezvous.fences import Fences
from rendezvous.membership import Membership
from rendezvous.messages import Fence, Standing, Status, Update
from rendezvous.types import Member, MemberKey, View
from rendezvous.views import Sizes

TIMING = Timing(0.5, 5.0)


def member(name: str, incarnation: int = 1) -> Member:
    return Member(name, incarnation, f"127.0.0.1:{7000 + ord(name) + 100 * incarnation}")


class Decides:
    def ballot(self) -> dict[str, object]:
        return {}

    def decide(self, *args: object) -> tuple[bool, dict[str, object]]:
        del args
        return False, {}

    def num_places(self, *args: object) -> None: ...


class Table:
    """What member a knows of a view; tests judge the others."""

    def __init__(self, names: str) -> None:
        self.out = Outbox()
        self.membership = Membership(member("a"), self.out, 0.0)
        sizes = Sizes(1, len(names), len(names))
        rng = random.Random(1)
        self.agreement = agreement = Agreement(
            self.membership, sizes, TIMING, False, Decides(), lambda view, now: None, rng, self.out
        )
        self.fences = Fences(self.membership, agreement, TIMING, self.out)
        for name in names[1:]:
            self.membership.apply(Update(member(name), Status.ALIVE, 0, "", False, name), 0.0)
        agreement.install(View("n", 1, 1, tuple(map(member, names)), (), (), "start"))
        self.out.drain()

    def judge(self, names: str, status: Status, *, proof: bool = False) -> None:
        for name in names:
            self.membership.judge(member(name).key, status, "silent for 5.00 s", 1.0, proof=proof)
        self.out.drain()

    def status(self, name: str) -> Status:
        return self.membership.records[member(name).key].status

    def questions(self, times_s: Iterable[float]) -> list[tuple[float, str]]:
        asked = []
        for now in times_s:
            self.fences.tick(now)
            asked += [(now, e.member.name) for e in self.out.drain() if isinstance(e, AskFence)]
        return asked


@pytest.mark.parametrize(
    ("view", "silent", "asked"),
    [
        ("ab", "b", "b"),
        ("abc", "c", ""),  # two of three decide without it
        ("abc", "bc", "bc"),
        ("abcd", "cd", "cd"),
        ("abcd", "d", ""),
    ],
)
def test_command_is_asked_only_about_members_whose_votes_are_missed(view: str, silent: str, asked: str) -> None:
    table = Table(view)
    assert table.questions([0.0]) == []
    table.judge(silent, Status.SUSPECT)
    assert table.questions([1.0]) == []
    table.judge(silent, Status.DEAD)
    assert table.questions([2.0]) == [(2.0, name) for name in asked]


def test_question_is_repeated_once_in_the_time_a_failure_takes_to_be_noticed() -> None:
    table = Table("ab")
    table.judge("b", Status.DEAD)
    assert table.questions(t / 2 for t in range(25)) == [(0.0, "b"), (5.0, "b"), (10.0, "b")]


@pytest.mark.parametrize("status", [Status.GONE, Status.FENCED])
def test_answer_gone_is_proof_and_ends_the_questions(status: Status) -> None:
    table = Table("ab")
    table.judge("b", Status.DEAD)
    table.fences.answered(FenceAnswered(member("b").key, status, "it is off"), 3.0)
    record = table.membership.records[member("b").key]
    assert (record.status, record.proof, record.reason) == (status, True, "it is off")
    assert Forget(member("b").address) in table.out.drain()
    assert table.questions([9.0]) == []


def test_answer_that_it_is_not_gone_is_said_and_changes_nothing() -> None:
    table = Table("ab")
    table.judge("b", Status.DEAD)
    table.fences.answered(FenceAnswered(member("b").key, None, "the command says no"), 3.0)
    assert table.out.drain() == [Waiting("b is silent and not known to be gone: the command says no")]
    assert table.status("b") is Status.DEAD


def test_answer_about_a_member_that_is_heard_from_again_is_void() -> None:
    table = Table("ab")
    table.judge("b", Status.DEAD)
    table.membership.apply(Update(member("b"), Status.ALIVE, 1, "", False, "b"), 2.0)
    table.fences.answered(FenceAnswered(member("b").key, Status.FENCED, "it is off"), 3.0)
    assert table.status("b") is Status.ALIVE
    table.fences.answered(FenceAnswered(MemberKey("nobody", 1), Status.GONE, "it is off"), 3.0)


@pytest.mark.parametrize(
    ("status", "proof", "standing", "text"),
    [
        (Status.ALIVE, False, Standing.ANSWERS, "b is alive: heard from 4.0 s ago"),
        (Status.SUSPECT, False, Standing.UNCLEAR, "b is only suspected so far"),
        (Status.DEAD, False, Standing.SILENT, "b is not heard from: silent for 5.00 s"),
        (Status.GONE, True, Standing.SILENT, "b is not heard from: silent for 5.00 s"),
        (Status.FENCED, True, Standing.ASSUMED_DEAD, "b is assumed dead already"),
    ],
)
def test_operator_that_asks_hears_what_is_known_and_nothing_changes(
    status: Status, proof: bool, standing: Standing, text: str
) -> None:
    table = Table("abc")
    table.judge("b", status, proof=proof)
    answer = table.fences.asked(Fence("b", "why", sure=False), 4.0)
    assert (answer.standing, answer.text) == (standing, text)
    assert table.status("b") is status


def test_operator_that_is_sure_is_believed_about_silent_members_only() -> None:
    table = Table("abc")
    assert table.fences.asked(Fence("b", "why", sure=True), 4.0).standing is Standing.ANSWERS
    assert table.fences.asked(Fence("a", "why", sure=True), 4.0).text == "a is this node itself"
    unknown = table.fences.asked(Fence("x", "why", sure=True), 4.0)
    assert unknown.standing is Standing.UNKNOWN
    assert unknown.text == "no vote of x is missed here; in the newest view are a, b, c"
    table.judge("b", Status.DEAD)
    assert table.fences.asked(Fence("b", "it burnt", sure=True), 4.0).standing is Standing.ASSUMED_DEAD
    record = table.membership.records[member("b").key]
    assert (record.status, record.proof, record.reason) == (Status.FENCED, True, "assumed dead: it burnt")


def test_restarted_agent_is_not_fenced_with_its_silent_predecessor() -> None:
    table = Table("ab")
    table.judge("b", Status.DEAD)
    table.membership.apply(Update(member("b", 2), Status.ALIVE, 0, "", False, "b"), 2.0)
    assert table.fences.asked(Fence("b", "why", sure=True), 4.0).standing is Standing.ASSUMED_DEAD
    assert table.status("b") is Status.FENCED
    assert table.membership.records[member("b", 2).key].status is Status.ALIVE


def test_application_that_knows_better_fences_whatever_is_known_here() -> None:
    table = Table("abc")
    table.fences.assume(AssumeDead("b", "the pod was deleted"), 1.0)
    assert table.status("b") is Status.FENCED


def test_operator_vouches_for_a_dead_stranger_that_spoke_of_a_view() -> None:
    table = Table("ab")
    stranger = member("x")
    table.membership.apply(Update(stranger, Status.ALIVE, 0, "", False, "x"), 0.0)
    table.agreement.hear_epoch(stranger.key, 9, 0.0)
    table.judge("x", Status.GONE, proof=True)
    assert table.fences.asked(Fence("x", "gone", sure=False), 1.0).standing is Standing.SILENT
    assert table.fences.asked(Fence("x", "gone", sure=True), 1.0).standing is Standing.ASSUMED_DEAD
    assert not table.agreement.missed()
    assert table.fences.asked(Fence("x", "gone", sure=False), 1.0).standing is Standing.UNKNOWN
