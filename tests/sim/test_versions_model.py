"""The version rules against every interleaving of captures, shipments, votes, commits, faults and recoveries.

The rules are the real ones (versions.py, placement.py, plan_recovery.py); slots hold a version and no bytes. In every
state that can be reached:

* once a version was protected, a whole version at least as new exists, and would still exist if any node died now, or
  with two copies any two (unless a shard's other copies were lost before and are not back yet);
* what a plan resumes is the newest whole version, none that went void, and each rank is sent to where that is;
* all ranks decide alike about capturing, also while the interval adapts to what any of them needs, and nothing that is
  being shipped is overwritten;
* a version in which ranks turned out to train apart counts for nothing;
* without another fault the newest step becomes protected.

Then one rule at a time is taken away, and the same exploration has to find out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import pytest
from versions_model import NOTHING, Cluster, Faults, Numbers, Rules, Violation, explore

from p2pstate.plan_recovery import Lineage, Plan, RankReport, StartOver, StateLost, plan_recovery
from p2pstate.types import RoundInfo, SlotRecord, Version
from p2pstate.versions import Course, next_slot

TWO, RING, PAIRS, TWO_BY_TWO = (0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 0, 1, 1)
ALL_OF_TWO, ALL_OF_FOUR, HYBRID = ((0, 1),), ((0, 1, 2, 3),), ((0, 2), (1, 3))
CRASH, LOSS = Faults(crashes=1), Faults(losses=1)
CRASH_AND_LOSS = Faults(crashes=1, losses=1)
SILENCE = Faults(silences=1)
APART = Faults(crashes=1, partings=1)
NEEDS = (1.0, 3.0)  # steps: so much that the interval grows, and so little that it shrinks again
CRASH_AND_TWO_AT_ONCE, TWO_AT_ONCE = Faults(crashes=1, pairs=1), Faults(pairs=1)

CLUSTERS = {
    "two nodes, a crash and a loss": Cluster(TWO, (), CRASH_AND_LOSS, 2),
    "two nodes, one falls silent and comes back": Cluster(TWO, (), SILENCE, 2, eager=True),
    "two nodes, leaves alike, an error": Cluster(TWO, ALL_OF_TWO, Faults(errors=1), 3),
    "two nodes, leaves alike, two losses": Cluster(TWO, ALL_OF_TWO, Faults(losses=2), 1),
    "two nodes, every second step, a loss": Cluster(TWO, (), LOSS, 4, every=2),
    "two nodes, an interval that adapts, a crash": Cluster(TWO, (), CRASH, 3, needs=NEEDS, eager=True),
    "two nodes, an interval that adapts, a loss": Cluster(TWO, (), LOSS, 4, needs=NEEDS, eager=True, brief=True),
    "two nodes of two, leaves alike, a loss": Cluster(TWO_BY_TWO, ALL_OF_FOUR, LOSS, 0),
    "two nodes, ranks train apart, a crash": Cluster(TWO, ALL_OF_TWO, APART, 1, eager=True),
    "two nodes, three crashes": Cluster(TWO, (), Faults(crashes=3), 1, eager=True),
    "three nodes, a crash": Cluster(RING, (), CRASH, 2, eager=True),
    "three nodes, a loss": Cluster(RING, (), LOSS, 2, eager=True),
    "four nodes, a crash": Cluster(PAIRS, (), CRASH, 1, eager=True),
    "lean on two nodes, two crashes": Cluster(TWO, (), Faults(crashes=2), 1, eager=True, lean=True),
    "lean with two copies on three nodes, a crash and a loss": Cluster(
        RING, (), CRASH_AND_LOSS, 0, copies=2, eager=True, brief=True, lean=True
    ),
    "two copies on three nodes, a step and a crash": Cluster(RING, (), CRASH, 1, copies=2, eager=True, brief=True),
    "two copies on three nodes, a crash and two lost at once": Cluster(
        RING, (), CRASH_AND_TWO_AT_ONCE, 0, copies=2, eager=True, brief=True
    ),
    "two copies on three nodes, a step and two lost at once": Cluster(RING, (), TWO_AT_ONCE, 1, copies=2, eager=True),
    "two copies on four nodes, two lost at once": Cluster(PAIRS, (), TWO_AT_ONCE, 1, copies=2, eager=True, brief=True),
}
LARGE = {
    "two nodes, an interval that adapts, a crash and a loss": Cluster(
        TWO, (), CRASH_AND_LOSS, 4, needs=NEEDS, eager=True
    ),
    "three nodes, an interval that adapts, a crash": Cluster(RING, (), CRASH, 2, needs=NEEDS, eager=True),
    "two nodes, one falls silent and comes back": Cluster(TWO, (), SILENCE, 2),
    "three nodes, a crash": Cluster(RING, (), CRASH, 2),
    "three nodes, a loss": Cluster(RING, (), LOSS, 2),
    "two copies on three nodes, two losses": Cluster(RING, (), Faults(losses=2), 0, copies=2, eager=True),
    "two copies on three nodes, a crash and a loss": Cluster(RING, (), CRASH_AND_LOSS, 0, copies=2, eager=True),
    "two copies on three nodes, a step, a crash and two lost at once": Cluster(
        RING, (), CRASH_AND_TWO_AT_ONCE, 1, copies=2, eager=True, brief=True
    ),
    "two nodes, three crashes": Cluster(TWO, (), Faults(crashes=3), 2),
    "two nodes, leaves alike, a crash and two losses": Cluster(TWO, ALL_OF_TWO, Faults(crashes=1, losses=2), 1),
    "two nodes, leaves alike, one falls silent and comes back": Cluster(TWO, ALL_OF_TWO, SILENCE, 2),
    "two nodes, ranks train apart, a crash and a loss": Cluster(
        TWO, ALL_OF_TWO, Faults(crashes=1, losses=1, partings=1), 2, eager=True
    ),
    "two nodes of two, ranks train apart, a loss": Cluster(
        TWO_BY_TWO, ALL_OF_FOUR, Faults(losses=1, partings=1), 2, eager=True, brief=True
    ),
    "two nodes of two, leaves alike, a step and a loss": Cluster(TWO_BY_TWO, ALL_OF_FOUR, LOSS, 1),
    "four nodes, a step and a crash": Cluster(PAIRS, (), CRASH, 1),
    "two nodes of two, a crash": Cluster(TWO_BY_TWO, (), CRASH, 2),
    "two nodes of two, a pair alike on both, a crash": Cluster(TWO_BY_TWO, HYBRID, CRASH, 1),
    "two nodes of two, a loss": Cluster(TWO_BY_TWO, (), LOSS, 2),
    "three nodes, a crash and a loss": Cluster(RING, (), CRASH_AND_LOSS, 2),
    "four nodes, a loss": Cluster(PAIRS, (), LOSS, 2),
    "four nodes, a crash and a loss": Cluster(PAIRS, (), CRASH_AND_LOSS, 0),
}


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interval that adapts does so at the second vote that asks for it: more do not fit within the bounds."""
    monkeypatch.setattr("p2pstate.interval.NUM_VOTES_UP", 2)
    monkeypatch.setattr("p2pstate.interval.NUM_VOTES_DOWN", 2)


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_state_within_the_bounds_keeps_every_invariant(name: str) -> None:
    explored = explore(CLUSTERS[name])
    print(f"\n{name}: {explored}")
    assert explored.num_recoveries > 20, "too tame to prove anything"


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_every_state_within_wider_bounds_keeps_every_invariant(name: str) -> None:
    print(f"\n{name}: {explore(LARGE[name])}")


def forgets_what_it_keeps(course: Course, version: Version, keep: Version) -> Course:
    del version
    return replace(course.resumed(keep), kept=None)


def never_tries_again(course: Course, step: int, outcome: Numbers, mine: Numbers) -> Course:
    del mine
    return course.committed(step, NOTHING if step > 1 else outcome.complete)


def goes_on_with_its_interval(course: Course, version: Version, keep: Version) -> Course:
    del version
    return replace(course.resumed(keep), every=course.every, interval=course.interval)


def plans_with(changed: Callable[[list[SlotRecord]], list[SlotRecord]]) -> Callable[..., Plan | StartOver | StateLost]:
    """A plan that is made from other records than there are."""

    def plan(
        info: RoundInfo,
        reports: Mapping[int, RankReport],
        records: list[SlotRecord],
        lineage: list[Lineage],
        num_losses: int,
    ) -> Plan | StartOver | StateLost:
        return plan_recovery(info, reports, changed(records), lineage, num_losses=num_losses)

    return plan


def without_the_newest(records: list[SlotRecord]) -> list[SlotRecord]:
    versions = sorted({record.version for record in records if record.version})
    if len(versions) > 1 and versions[-2].step > 0:  # before, a start from scratch is right
        return [record for record in records if record.version != versions[-1]]
    return records


def as_if_alike(records: list[SlotRecord]) -> list[SlotRecord]:
    return [replace(record, balance=0) for record in records]


# name: the mutant, the cluster it is let loose in, what has to be found
MUTANTS = {
    "the kept slot is written": (
        Rules(next_slot=lambda held, keep: 1 - next_slot(held, keep)),
        Cluster(TWO, (), CRASH, 2),
        "was protected, and None is the newest that is whole",
    ),
    "captured before the version before is protected": (
        Rules(
            committed=lambda course, step, outcome, mine: course.committed(step, course.captured or outcome.complete)
        ),
        Cluster(TWO, (), Faults(), 2),
        "while .* is being shipped",
    ),
    "a rank decides by what it has completed itself": (
        Rules(committed=lambda course, step, outcome, mine: course.committed(step, mine.complete)),
        Cluster(TWO, (), Faults(), 2),
        "decides otherwise than the others",
    ),
    "a rank goes by what it needs itself": (
        Rules(committed=lambda course, step, outcome, mine: course.committed(step, outcome.complete, mine.need)),
        Cluster(TWO, (), Faults(), 4, needs=NEEDS, eager=True),
        "decides otherwise than the others",
    ),
    "survivors go on with the interval they had": (
        Rules(resumed=goes_on_with_its_interval),
        Cluster(TWO, (), CRASH, 3, needs=NEEDS, eager=True),
        "decides otherwise than the others",
    ),
    "void versions are used": (
        Rules(plan=lambda info, reports, records, lineage, num_losses: plan_recovery(info, reports, records)),
        Cluster(TWO, (), SILENCE, 2, eager=True),
        "which is void",
    ),
    "a half-written slot counts": (
        Rules(header=lambda slot: Version(slot[0], slot[1]) if slot else None),
        Cluster(TWO, (), CRASH, 2),
        "the newest that is whole is",
    ),
    "the resumed version is kept instead of the protected one": (
        Rules(resumed=lambda course, version, keep: course.resumed(version)),
        Cluster(TWO, (), CRASH, 2),
        "was protected, and None is the newest that is whole, should node . die now",
    ),
    "nothing is kept after a recovery": (
        Rules(resumed=forgets_what_it_keeps),
        Cluster(TWO, (), CRASH, 2),
        "was protected, and .* is the newest that is whole",
    ),
    "a start from scratch writes the initial state's slot": (
        Rules(next_slot=lambda held, keep: next_slot(held, keep or Version(9, 9))),
        Cluster(TWO, (), CRASH_AND_LOSS, 2),
        "the state is lost",
    ),
    "the plan goes back too far": (
        Rules(plan=plans_with(without_the_newest)),
        Cluster(TWO, (), CRASH, 2),
        "the newest that is whole is",
    ),
    "with two copies, only the loss of one node is thought of": (
        Rules(plan=lambda info, reports, records, lineage, num_losses: plan_recovery(info, reports, records, lineage)),
        Cluster(RING, (), CRASH, 1, copies=2, eager=True, brief=True),
        "was protected, and None is the newest that is whole, should node . and . die now",
    ),
    "a version of ranks that train apart is kept": (
        Rules(committed=lambda course, step, outcome, mine: course.committed(step, outcome.complete)),
        Cluster(TWO, ALL_OF_TWO, APART, 2, eager=True),
        "was protected, and None is the newest that is whole",
    ),
    "a version of ranks that train apart is resumed": (
        Rules(plan=plans_with(as_if_alike)),
        Cluster(TWO, ALL_OF_TWO, APART, 2, eager=True),
        "the newest that is whole is",
    ),
    "a skipped version is never made up for": (
        Rules(committed=never_tries_again),
        Cluster(TWO, (), Faults(), 2),
        "the newest is never protected",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_rule_taken_away_is_noticed(name: str) -> None:
    mutant, cluster, text = MUTANTS[name]
    with pytest.raises(Violation, match=text):
        explore(cluster, mutant)


@pytest.mark.slow
def test_keeping_what_the_fewest_losses_would_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of versions that outlive different losses, the newer is no better: what it does not outlive was promised."""

    def fewest(fatal_losses: Mapping[Version, Collection[frozenset[str]]]) -> Version:
        return min(sorted(fatal_losses, reverse=True), key=lambda version: len(fatal_losses[version]))

    monkeypatch.setattr("p2pstate.plan_recovery.version_to_keep", fewest)
    with pytest.raises(Violation, match="None is the newest that is whole"):
        explore(Cluster(RING, (), CRASH_AND_LOSS, 1))
