"""The real protocol core under random and scripted faults in a simulated network; and proof that these tests can fail.

Each schedule is a function of its seed: a failure names the seed, and `run_seed(seed)` repeats it exactly.
"""

from __future__ import annotations

import random

import pytest

from rendezvous import agreement, views
from rendezvous.agreement import Agreement, Proposal
from rendezvous.faults import Fault, random_schedule
from rendezvous.testing import InvariantViolation, Simulation
from rendezvous.types import Change, MemberKey, View
from rendezvous.views import Sizes

NUM_SEEDS = 300
FAULTS_UNTIL_S = 4.0
CALM_UNTIL_S = 8.0


def run_seed(seed: int) -> Simulation:
    """One random cluster under one random schedule, then a calm in which it must come together again."""
    rng = random.Random(seed)
    names = [f"n{index}" for index in range(rng.choice((2, 3, 3, 4, 5)))]
    witnesses = ["w0"] if rng.random() < 0.3 else []
    num_nodes_max = rng.randint(1, len(names))
    simulation = Simulation(
        seed,
        names,
        random_schedule(rng, names + witnesses, FAULTS_UNTIL_S, rng.randint(2, 10)),
        num_nodes_min=rng.randint(1, num_nodes_max),
        num_nodes_max=num_nodes_max,
        witnesses=witnesses,
        start_s={name: rng.uniform(0.0, FAULTS_UNTIL_S) for name in names if rng.random() < 0.1},
    )
    simulation.run_until(FAULTS_UNTIL_S)
    simulation.calm()
    simulation.run_until(CALM_UNTIL_S)
    simulation.check_converged()
    return simulation


def test_random_schedules_keep_every_invariant_and_converge() -> None:
    num_epochs = sum(len(run_seed(seed).decided) for seed in range(NUM_SEEDS))
    assert num_epochs > 2 * NUM_SEEDS, "the schedules are too tame to prove anything"


@pytest.mark.slow
def test_many_more_random_schedules_keep_every_invariant_and_converge() -> None:
    for seed in range(NUM_SEEDS, NUM_SEEDS + 3000):
        run_seed(seed)


def test_same_seed_gives_the_same_run() -> None:
    assert run_seed(7).trace == run_seed(7).trace


def any_vote(
    view: View | None,
    votes: set[MemberKey],
    gone: frozenset[MemberKey],
    fenced: frozenset[MemberKey],
    known: object,
    sizes: Sizes,
) -> bool:
    del gone, fenced, known, sizes
    return bool(votes if view is None else votes & view.keys)


def any_tie(
    view: View | None,
    votes: set[MemberKey],
    gone: frozenset[MemberKey],
    fenced: frozenset[MemberKey],
    known: list[MemberKey],
    sizes: Sizes,
) -> bool:
    if view is None:
        return views.has_quorum(view, votes, gone, fenced, known, sizes)
    return 2 * len(votes & view.keys) >= len(view.keys)


def all_that_live(
    view: View | None,
    votes: set[MemberKey],
    gone: frozenset[MemberKey],
    fenced: frozenset[MemberKey],
    known: list[MemberKey],
    sizes: Sizes,
) -> bool:
    """A tempting rule: whoever is proven dead is not needed, however many they are."""
    whole = views.has_quorum(view, votes, gone, fenced, known, sizes)
    return whole or (view is not None and bool(votes & view.keys) and view.keys - votes <= gone)


def adopt_nothing(proposal: Proposal) -> None:
    del proposal


def restarted_votes_too(self: Agreement) -> bool:
    if self.abstains or self.highest_seen_epoch > self.epoch:
        return False
    return self.view is None or self.me in self.view.keys


def decided_epoch_again(self: Agreement) -> int:
    return max(0, self.view.epoch - 1) if self.view else 0


MUTATIONS: dict[str, tuple[object, str, object]] = {
    "a single vote decides": (agreement, "has_quorum", any_vote),
    "half decides without proof": (agreement, "has_quorum", any_tie),
    "whoever is proven dead is not needed": (agreement, "has_quorum", all_that_live),
    "an accepted value is ignored": (Agreement, "_adopted", staticmethod(adopt_nothing)),
    "a restarted voter votes in a first view": (Agreement, "is_voter", restarted_votes_too),
    "an epoch is used again": (Agreement, "epoch", property(decided_epoch_again)),
}


def scripted(schedule: list[Fault], names: str, until_s: float, **options: object) -> Simulation:
    simulation = Simulation(0, list(names), schedule, **options)  # type: ignore[arg-type]
    simulation.run_until(until_s)
    return simulation


def run_cut_off_while_the_others_go_on_and_die() -> Simulation:
    """c is cut off; a and b go on with d; then a and b die while c can reach neither of the living."""
    schedule = [
        Fault(2.0, "cut", "c"),
        Fault(6.0, "heal"),
        Fault(6.0, "cut", "c|d"),
        Fault(6.0, "crash", "a"),
        Fault(6.0, "crash", "b"),
    ]
    return scripted(schedule, "abcd", 9.0, num_nodes_min=1, start_s={"d": 3.5})


def run_everything_that_finds_mistakes() -> None:
    """Scripted cases that a broken rule turns into a violation, then some random schedules."""
    scripted([Fault(2.0, "ambush_crash"), Fault(2.0, "propose", "b")], "abc", 6.0, num_nodes_min=1)
    scripted([Fault(2.0, "cut", "a,b"), Fault(4.0, "heal")], "abcd", 6.0, num_nodes_min=1)
    restarted = [Fault(2.0, "cut", "a"), *(Fault(2.0, "crash", name) for name in "bc")]
    scripted([*restarted, *(Fault(2.1, "restart", name) for name in "bc")], "abc", 6.0, num_nodes_min=1)
    run_cut_off_while_the_others_go_on_and_die()
    for seed in range(40):
        run_seed(seed)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_broken_rule_is_found(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, name, replacement = MUTATIONS[mutation]
    monkeypatch.setattr(target, name, replacement)
    with pytest.raises(InvariantViolation):
        run_everything_that_finds_mistakes()


def test_unbroken_rules_pass_what_finds_the_broken_ones() -> None:
    run_everything_that_finds_mistakes()


def test_cut_off_member_does_not_go_on_alone_when_all_it_knows_are_proven_dead() -> None:
    simulation = run_cut_off_while_the_others_go_on_and_die()
    assert {m.name for m in simulation.decided[3].members} == {"a", "b", "d"}
    assert simulation.nodes["c"].core.newest == simulation.decided[1]
    assert all(simulation.nodes["c"].core.membership.records[m.key].ended for m in simulation.decided[1].places)


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
