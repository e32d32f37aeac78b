"""The membership table: which news wins, what is told to whom."""

from __future__ import annotations

import itertools
import random

import pytest

from rendezvous.effects import Changed, Effect, Outbox, Send
from rendezvous.membership import BROADCAST_LIMIT, Membership
from rendezvous.messages import Gossip, Status, Update
from rendezvous.plain import MAX_COUNTER
from rendezvous.types import Change, Member, Role


def member(name: str, incarnation: int = 1, **more: object) -> Member:
    return Member(name, incarnation, f"127.0.0.1:{7000 + ord(name[0])}", **more)  # type: ignore[arg-type]


def news(name: str, status: Status, refutation: int = 0, *, proof: bool = False, origin: str = "x") -> Update:
    return Update(member(name), status, refutation, "because", proof, origin)


def table() -> tuple[Membership, Outbox]:
    out = Outbox()
    return Membership(member("a"), out, 0.0), out


def changes(effects: list[Effect]) -> list[tuple[Change, str, bool]]:
    return [(e.change.kind, e.change.member.name, e.change.proof) for e in effects if isinstance(e, Changed)]


A, S, D, L, G, F = Status.ALIVE, Status.SUSPECT, Status.DEAD, Status.LEFT, Status.GONE, Status.FENCED


@pytest.mark.parametrize(
    ("held", "coming", "result"),
    [
        ((A, 0), (S, 0), (S, 0)),
        ((S, 0), (A, 0), (S, 0)),
        ((S, 0), (A, 1), (A, 1)),
        ((A, 1), (S, 0), (A, 1)),
        ((A, 1), (D, 0), (A, 1)),
        ((S, 0), (D, 0), (D, 0)),
        ((D, 0), (S, 0), (D, 0)),
        ((D, 0), (A, 1), (A, 1)),
        ((A, 9), (L, 0), (L, 0)),
        ((A, 9), (G, 0), (G, 0)),
        ((G, 0), (A, 9), (G, 0)),
        ((L, 0), (A, 9), (L, 0)),
        ((L, 0), (G, 0), (G, 0)),
        ((G, 0), (L, 0), (G, 0)),
        ((G, 0), (F, 0), (F, 0)),
        ((F, 0), (G, 9), (F, 0)),
    ],
)
def test_news_wins_by_finality_then_refutation_then_severity(
    held: tuple[Status, int], coming: tuple[Status, int], result: tuple[Status, int]
) -> None:
    membership, _ = table()
    membership.apply(news("b", *held), 1.0)
    is_news = membership.apply(news("b", *coming), 2.0)
    record = membership.records[member("b").key]
    assert (record.status, record.refutation) == result
    assert is_news == (held != result)


def test_tables_agree_whatever_the_order_of_the_same_news() -> None:
    updates = [news("b", A, 0), news("b", S, 0), news("b", A, 1), news("b", D, 1), news("b", A, 2), news("b", S, 2)]
    results = set()
    for order in itertools.permutations(updates):
        membership, _ = table()
        for update in order:
            membership.apply(update, 0.0)
        record = membership.records[member("b").key]
        results.add((record.status, record.refutation))
    assert results == {(S, 2)}


def test_each_change_of_status_is_told_once() -> None:
    membership, out = table()
    for update in (news("b", A), news("b", A), news("b", S), news("b", S), news("b", A, 1), news("b", G, proof=True)):
        membership.apply(update, 0.0)
    assert changes(out.drain()) == [
        (Change.JOINED, "b", False),
        (Change.SUSPECT, "b", False),
        (Change.ALIVE, "b", False),
        (Change.DEAD, "b", True),
    ]


def test_departure_then_proof_of_death_is_told_as_departure_only() -> None:
    membership, out = table()
    for update in (news("b", A), news("b", L, proof=True), news("b", G, proof=True)):
        membership.apply(update, 0.0)
    assert changes(out.drain()) == [(Change.JOINED, "b", False), (Change.LEFT, "b", True)]
    assert membership.records[member("b").key].status is G


@pytest.mark.parametrize("status", [S, D])
def test_rumour_about_oneself_is_refuted_with_a_higher_number_and_told_at_once(status: Status) -> None:
    membership, out = table()
    membership.apply(news("b", A), 0.0)
    out.drain()
    membership.apply(news("a", status, 4), 1.0)
    assert membership.own.refutation == 5
    (sent,) = [e for e in out.drain() if isinstance(e, Send)]
    assert isinstance(sent.message, Gossip)
    (update,) = sent.message.updates
    assert (update.member.name, update.status, update.refutation) == ("a", A, 5)


def test_old_rumour_about_oneself_is_ignored() -> None:
    membership, _ = table()
    membership.apply(news("a", S, 4), 1.0)
    membership.apply(news("a", S, 3), 2.0)
    assert membership.own.refutation == 5


def test_final_word_about_oneself_is_taken_and_not_refuted() -> None:
    membership, _ = table()
    membership.apply(news("a", G, 0, proof=True), 1.0)
    assert membership.own.status is G
    assert membership.own.refutation == 0


def test_number_that_cannot_be_outbid_does_not_make_a_member_say_what_nobody_understands() -> None:
    membership, _ = table()
    membership.apply(news("a", S, MAX_COUNTER), 1.0)
    assert membership.own.refutation == 0
    membership.apply(news("a", S, MAX_COUNTER - 1), 1.0)
    assert membership.own.refutation == MAX_COUNTER


def test_independent_accusers_are_counted_and_the_same_one_is_no_news() -> None:
    membership, _ = table()
    membership.apply(news("b", A), 0.0)
    assert membership.apply(news("b", S, origin="c"), 1.0)
    assert not membership.apply(news("b", S, origin="c"), 2.0)
    assert membership.apply(news("b", S, origin="d"), 3.0)
    suspicion = membership.records[member("b").key].suspicion
    assert suspicion is not None
    assert suspicion.accusers == {"c", "d"}
    assert suspicion.since_s == 1.0


def test_more_accusers_than_count_are_no_news() -> None:
    membership, _ = table()
    membership.apply(news("b", A), 0.0)
    assert all(membership.apply(news("b", S, origin=origin), 1.0) for origin in "cdef")
    assert not membership.apply(news("b", S, origin="g"), 1.0)


def test_first_hand_judgement_goes_to_every_live_member_at_once() -> None:
    membership, out = table()
    for name in "bcd":
        membership.apply(news(name, A), 0.0)
    membership.apply(news("d", G, proof=True), 0.0)
    out.drain()
    membership.judge(member("b").key, Status.SUSPECT, "no answer", 1.0)
    assert [e.to.name for e in out.drain() if isinstance(e, Send) and e.to] == ["c"]


def test_news_rides_on_heartbeats_a_bounded_number_of_times() -> None:
    membership, _ = table()
    membership.apply(news("b", A), 0.0)
    taken = 0
    while membership.take_news():
        taken += 1
        assert taken < 100
    assert taken == 6  # 3 * ceil(log2(2 members + 1))


def test_gone_and_fenced_tell_whose_votes_are_lost() -> None:
    membership, _ = table()
    for update in (
        news("b", G, proof=True),
        news("c", D),
        news("d", G),
        news("e", L, proof=True),
        news("f", F, proof=True),
    ):
        membership.apply(update, 0.0)
    assert {key.name for key in membership.gone()} == {"b", "e", "f"}
    assert {key.name for key in membership.fenced()} == {"f"}


def test_candidates_are_live_members_of_the_role_outside_the_view() -> None:
    membership, _ = table()
    membership.apply(news("b", A), 0.0)
    membership.apply(news("c", D), 0.0)
    membership.apply(Update(member("w", role=Role.WITNESS), A, 0, "", False, "x"), 0.0)
    assert [m.name for m in membership.candidates(Role.NODE, frozenset({member("a").key}))] == ["b"]
    assert [m.name for m in membership.candidates(Role.WITNESS, frozenset())] == ["w"]


def test_records_of_gone_members_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rendezvous.membership.MAX_GONE", 10)
    membership, _ = table()
    rng = random.Random(1)
    for life in range(100):
        update = Update(member("b", life), G, 0, "", True, "x")
        membership.apply(update, rng.random())
    assert len(membership.records) == 11


def test_tables_have_equal_digests_exactly_when_they_agree() -> None:
    updates = [news(name, status, refutation) for name in "bcd" for status in (A, S, L, G) for refutation in (0, 1)]
    (one, _), (two, _) = table(), table()
    for update in updates:
        one.apply(update, 0.0)
        assert one.digest != two.digest
    for update in random.Random(3).sample(updates, len(updates)):
        two.apply(update, 1.0)
    assert one.digest == two.digest
    one.apply(news("e", A), 2.0)
    two.apply(news("e", S), 2.0)
    assert one.digest != two.digest
    two.apply(news("e", A, 1), 3.0)
    assert one.digest != two.digest  # one has not heard of the refutation
    one.apply(news("e", A, 1), 3.0)
    assert one.digest == two.digest


@pytest.mark.parametrize("seed", range(20))
def test_sums_over_the_table_are_those_of_its_records(seed: int) -> None:
    membership, _ = table()
    rng = random.Random(seed)
    for step in range(60):
        name = rng.choice("bcdefgh" if step < 50 else "abcdefgh")  # towards the end also about this member itself
        statuses = [A, S, D, L, G, F] if name != "a" or seed % 2 else [A, S]
        membership.apply(news(name, rng.choice(statuses), rng.randrange(4), proof=rng.random() < 0.5), step)
    records = list(membership.records.values())
    assert membership.num_live() == sum(record.live for record in records)
    assert membership.num_alive() == sum(record.status is A for record in records)
    assert membership.num_silent() == sum(record.status is D for record in records)
    assert membership.gone() == {r.member.key for r in records if r.ended and r.proof}
    assert membership.fenced() == {r.member.key for r in records if r.status is F}
    assert set(membership.suspects) == {r.member.key for r in records if r.suspicion is not None}
    again, _ = table()
    if membership.refuted:
        again.apply(news("a", S, membership.own.refutation - 1), 0.0)
    for update in membership.table():
        again.apply(update, 0.0)
    assert again.digest == membership.digest


def test_member_that_leaves_counts_itself_out_and_tells_all_that_live() -> None:
    membership, out = table()
    membership.apply(news("b", A), 0.0)
    membership.apply(news("c", D), 0.0)
    out.drain()
    membership.leave("maintenance")
    (send,) = [e for e in out.drain() if isinstance(e, Send)]
    assert send.to == member("b").key
    assert send.message == Gossip((Update(member("a"), L, 0, "maintenance", True, "a"),))
    assert (membership.num_alive(), membership.gone()) == (1, {member("a").key})


def test_news_of_a_large_group_is_not_sent_to_everybody_by_who_has_it() -> None:
    membership, out = table()
    for index in range(BROADCAST_LIMIT):
        membership.apply(news(f"n{index}", A), 0.0)
    out.drain()
    membership.judge(member("n0").key, Status.SUSPECT, "no answer", 1.0)
    assert [e for e in out.drain() if isinstance(e, Send)] == []
    assert membership.has_news
