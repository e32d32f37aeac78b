"""Proof that the simulations can fail: each rule of the protocol that is broken on purpose is found by them."""

from __future__ import annotations

from typing import Any

import pytest
from simulated_runs import (
    run_assumed_dead_but_only_cut_off,
    run_cut_off_while_the_others_go_on_and_die,
    run_misspoken_and_dead,
    run_seed,
    run_third_that_never_heard_of_the_fence,
    run_two_of_three_acceptors_restarted,
    scripted,
)

from rendezvous import agreement, views
from rendezvous.agreement import Agreement, Proposal
from rendezvous.faults import Fault
from rendezvous.hearsay import Hearsay
from rendezvous.membership import Membership, Record
from rendezvous.messages import AcceptedVote, Promise, Reject, Status, Update
from rendezvous.motives import Motives
from rendezvous.types import MemberKey, View

Votes = set[MemberKey]


def any_vote(view: View | None, votes: Votes, *_: object) -> bool:
    return bool(votes if view is None else votes & view.keys)


def any_tie(view: View | None, votes: Votes, *rest: Any) -> bool:
    if view is None:
        return views.has_quorum(view, votes, *rest)
    return 2 * len(votes & view.keys) >= len(view.keys)


def all_that_live(view: View | None, votes: Votes, gone: Votes, *rest: Any) -> bool:
    """A tempting rule: whoever is proven dead is not needed, however many they are."""
    whole = views.has_quorum(view, votes, gone, *rest)
    return whole or (view is not None and bool(votes & view.keys) and view.keys - votes <= gone)


def majority_of_the_unfenced(view: View | None, votes: Votes, gone: Votes, fenced: Votes, *rest: Any) -> bool:
    """A tempting rule: fenced members are left out of the count, and a majority of the others suffices."""
    whole = views.has_quorum(view, votes, gone, fenced, *rest)
    return whole or (view is not None and 2 * len(votes & view.keys - fenced) > len(view.keys - fenced))


def refuted_like_silence(update: Update, record: Record) -> bool:
    """A fenced member that says that it lives is believed."""
    if record.status is Status.FENCED:
        return update.status <= Status.SUSPECT
    return newer(update, record)


def adopt_nothing(proposal: Proposal) -> None:
    del proposal


def word_of_a_view_is_for_ever(self: Hearsay, now: float) -> None:
    del self, now


def restarted_votes_too(self: Agreement) -> bool:
    if self.abstains or self._hearsay.said_by(self._membership.fenced(), fresh=self.view is not None):
        return False
    return self.view is None or self.me in self.view.keys


def decided_epoch_again(self: Agreement) -> int:
    return max(0, self.view.epoch - 1) if self.view else 0


def by_name(self: Agreement, key: MemberKey) -> MemberKey:
    """The incarnation in the view that has this name, whichever it is."""
    return next((known for known in self.view.keys if known.name == key.name), key) if self.view else key


def any_incarnation_is_voter(self: Agreement) -> bool:
    if self.view is None:
        return is_voter(self)
    return not self.abstains and by_name(self, self.me) in self.view.keys


def any_incarnation_answers(
    self: Agreement, proposal: Proposal, sender: MemberKey, message: Promise | AcceptedVote | Reject, now: float
) -> None:
    on_answer(self, proposal, by_name(self, sender), message, now)


def any_incarnation_is_asked(self: Agreement) -> list[Record]:
    records = [record for record in self._membership.others() if not record.ended]
    return [record for record in records if self.view is None or by_name(self, record.member.key) in self.view.keys]


def turn_of_members(self: Motives) -> float:
    """Who votes for its predecessor has no turn of its own."""
    view = self._agreement.view
    return float("inf") if view is not None and self._membership.me.key not in view.keys else turn_s(self)


is_voter, on_answer, turn_s = Agreement.is_voter, Agreement._on_answer, Motives._turn_s


newer = Membership._newer


MUTATIONS: dict[str, list[tuple[object, str, object]]] = {
    "a single vote decides": [(agreement, "has_quorum", any_vote)],
    "half decides without proof": [(agreement, "has_quorum", any_tie)],
    "whoever is proven dead is not needed": [(agreement, "has_quorum", all_that_live)],
    "an accepted value is ignored": [(Agreement, "_adopted", staticmethod(adopt_nothing))],
    "a restarted voter votes in a first view": [(Agreement, "is_voter", restarted_votes_too)],
    "an incarnation votes for its predecessor": [
        (Agreement, "is_voter", any_incarnation_is_voter),
        (Agreement, "voters", any_incarnation_is_asked),
        (Agreement, "_on_answer", any_incarnation_answers),
        (Motives, "_turn_s", turn_of_members),
    ],
    "a fence is forgotten": [
        (Membership, "_newer", staticmethod(refuted_like_silence)),
        (Record, "ended", property(lambda self: Status.LEFT <= self.status < Status.FENCED)),
    ],
    "a majority of those that are not fenced decides": [(agreement, "has_quorum", majority_of_the_unfenced)],
    "the dead are believed that there is a newer view": [(Hearsay, "tick", word_of_a_view_is_for_ever)],
    "an epoch is used again": [(Agreement, "epoch", property(decided_epoch_again))],
}


def run_everything_that_finds_mistakes() -> None:
    """Scripted cases that a broken rule turns into a violation, then some random schedules."""
    scripted([Fault(2.0, "ambush_crash"), Fault(2.0, "propose", "b")], "abc", 6.0, num_nodes_min=1)
    scripted([Fault(2.0, "cut", "a,b"), Fault(4.0, "heal")], "abcd", 6.0, num_nodes_min=1)
    restarted = [Fault(2.0, "cut", "a"), *(Fault(2.0, "crash", name) for name in "bc")]
    scripted([*restarted, *(Fault(2.1, "restart", name) for name in "bc")], "abc", 6.0, num_nodes_min=1)
    run_cut_off_while_the_others_go_on_and_die()
    run_two_of_three_acceptors_restarted()
    run_assumed_dead_but_only_cut_off().check_converged()
    run_third_that_never_heard_of_the_fence()
    run_misspoken_and_dead().check_converged()
    for seed in range(40):
        run_seed(seed)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_broken_rule_is_found(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for target, name, replacement in MUTATIONS[mutation]:
        monkeypatch.setattr(target, name, replacement)
    with pytest.raises(AssertionError):  # an InvariantViolation, or the code's own assertion
        run_everything_that_finds_mistakes()


def test_unbroken_rules_pass_what_finds_the_broken_ones() -> None:
    run_everything_that_finds_mistakes()
