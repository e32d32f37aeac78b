"""The real protocol core under random and scripted faults in a simulated network; and proof that these tests can fail.

Each schedule is a function of its seed: a failure names the seed, and `run_seed(seed)` repeats it exactly.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import subprocess
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from rendezvous import agreement, views
from rendezvous.agreement import Agreement, Proposal
from rendezvous.config import Timing
from rendezvous.faults import Fault, deciding_schedule, fencing_schedule, random_schedule
from rendezvous.hearsay import Hearsay
from rendezvous.membership import Membership, Record
from rendezvous.messages import AcceptedVote, Promise, Reject, Status, Update
from rendezvous.motives import Motives
from rendezvous.testing import Simulation
from rendezvous.types import Change, MemberKey, View
from rendezvous.views import Sizes

NUM_SEEDS = 300
NUM_DECIDING_SEEDS = 2100
NUM_FENCING_SEEDS = 60
NUM_DECIDING_NEEDED = 2000
NUM_EVENTS_NEEDED = 2_000_000
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is left of a simulation that ran in another process."""

    num_events: int
    num_epochs: int
    coverage: Counter[str]

    @property
    def hit_decisions(self) -> bool:
        """Did both a partition and a crash come while a view was being decided?"""
        return bool(self.coverage["strike_cut"] and self.coverage["strike_crash"])


def run_deciding_seed(seed: int) -> Outcome:
    """Five to seven members, some of them witnesses, and faults that wait for a decision to hit it."""
    rng = random.Random(f"deciding {seed}")
    names = [f"n{index}" for index in range(rng.choice((5, 5, 5, 6, 7)))]
    witnesses = [names.pop()] if rng.random() < 0.3 else []
    num_nodes_max = rng.randint(2, len(names))
    simulation = Simulation(
        seed,
        names,
        deciding_schedule(rng, names + witnesses, 1.6, rng.randint(1, 4)),
        num_nodes_min=rng.randint(1, num_nodes_max),
        num_nodes_max=num_nodes_max,
        witnesses=witnesses,
    )
    simulation.run_until(1.6)
    simulation.calm()
    simulation.run_until(2.6)
    if not simulation.has_converged():  # few take longer
        simulation.run_until(4.6)
    simulation.check_converged()
    return Outcome(simulation.num_events, len(simulation.decided), simulation.coverage)


def run_deciding_seeds(seeds: range) -> tuple[int, int, Counter[str]]:
    """-> (schedules whose faults hit decisions, events, coverage). A failing seed raises, naming itself."""
    coverage: Counter[str] = Counter()
    num_hit = num_events = 0
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        for outcome in pool.map(run_deciding_seed, seeds, chunksize=25):
            num_hit += outcome.hit_decisions
            num_events += outcome.num_events
            coverage += outcome.coverage
    transitions = "\n".join(f"{count:9} {text}" for text, count in sorted(coverage.items()))
    print(f"{num_hit} of {len(seeds)} schedules hit decisions, {num_events} events\n{transitions}")
    return num_hit, num_events, coverage


def test_partitions_and_crashes_while_views_are_decided_keep_every_invariant() -> None:
    num_hit, num_events, coverage = run_deciding_seeds(range(NUM_DECIDING_SEEDS))
    assert num_hit >= NUM_DECIDING_NEEDED
    assert num_events >= NUM_EVENTS_NEEDED
    kinds = {"first", "grown", "shrunk", "a spare stepped in", "another round, same places"}
    assert {f"view: {kind}" for kind in kinds} <= set(coverage)
    changes = {"joined", "suspect", "alive", "dead", "dead with proof", "left with proof"}
    assert {"evicted", "misspoke", *(f"member {change}" for change in changes)} <= set(coverage)


def test_fault_that_waits_for_a_decision_does_not_come_in_the_calm() -> None:
    """In these schedules it was on its way when the calm began, and nobody would have ended it."""
    for seed in (3002433, 3002480, 3002611):
        assert not run_deciding_seed(seed).hit_decisions


def run_fencing_seed(seed: int) -> Simulation:
    """Two to six members; some fall silent, are assumed dead, and come back."""
    rng = random.Random(f"fencing {seed}")
    names = [f"n{index}" for index in range(rng.choice((2, 2, 3, 3, 4, 5, 6)))]
    witnesses = [names.pop()] if len(names) > 2 and rng.random() < 0.3 else []
    schedule, silent = fencing_schedule(rng, names + witnesses, 4.5)
    simulation = Simulation(
        seed,
        names,
        schedule,
        num_nodes_min=1,
        num_nodes_max=rng.randint(1, len(names)),
        witnesses=witnesses,
        fencing_command=rng.random() < 0.3,
    )
    simulation.run_until(4.5)
    simulation.calm()
    simulation.run_until(8.0)
    simulation.check_converged()
    assert {key.name for key in simulation.vouched} <= silent
    return simulation


def test_members_assumed_dead_that_come_back_are_fenced() -> None:
    runs = [run_fencing_seed(seed) for seed in range(NUM_FENCING_SEEDS)]
    coverage = sum((run.coverage for run in runs), Counter[str]())
    came_back = [run for run in runs if any(n.member.key in run.vouched and n.evicted for n in run.nodes.values())]
    print(f"in {len(came_back)} of {len(runs)} runs a member came back that was assumed dead: {coverage}")
    assert len(came_back) > NUM_FENCING_SEEDS / 4
    assert {"assumed dead", "fencing command: gone", "fencing command: not gone"} <= set(coverage)


def test_large_group_learns_of_deaths_and_a_partition_by_rumours() -> None:
    """More members than tell each other everything themselves. The cut off ones take all others for dead meanwhile."""
    names = [f"n{index}" for index in range(34)]
    cut = ("n1", "n2", "n3")
    schedule = [
        Fault(2.0, "crash", "n7"),
        Fault(2.0, "pause", "n8"),
        Fault(3.5, "cut", ",".join(cut)),
        Fault(5.5, "heal"),
    ]
    simulation = Simulation(5, names, schedule, num_nodes_min=20, num_nodes_max=34)
    simulation.run_until(7.0)
    newest = max(simulation.decided.values(), key=lambda view: view.epoch)
    assert {m.name for m in newest.members} == set(names) - {"n7", "n8", *cut}
    assert all(simulation.nodes[name].evicted for name in cut)
    assert simulation.coverage["member dead with proof"]
    simulation.calm()
    simulation.run_until(8.0)
    simulation.check_converged()


def test_slow_hosts_form_a_view_and_do_not_drown_in_their_own_messages() -> None:
    """Each message costs each of 16 hosts 20 ms, as on a machine with a load of 25: then their answers come late, and
    suspicions, help and repetition must not add to it.
    """
    names = [f"n{index}" for index in range(16)]
    simulation = Simulation(1, names, num_nodes_min=8, num_nodes_max=16, timing=Timing(0.5, 5.0), service_s=0.02)
    simulation.run_until(10.0)
    (view,) = simulation.decided.values()
    assert len(view.members) == 16
    num_events, num_suspicions = simulation.num_events, simulation.coverage["member suspect"]
    simulation.run_until(16.0)
    assert simulation.coverage["member suspect"] - num_suspicions < 16
    assert simulation.num_events - num_events < 16 * 6.0 * 30
    assert not simulation.coverage["member dead"]


@pytest.mark.slow
def test_many_more_members_assumed_dead_are_fenced() -> None:
    for seed in range(NUM_FENCING_SEEDS, NUM_FENCING_SEEDS + 5000):
        run_fencing_seed(seed)


@pytest.mark.soak
@pytest.mark.parametrize("block", range(1, 101))
def test_a_hundred_times_as_many_partitions_and_crashes_keep_every_invariant(block: int) -> None:
    run_deciding_seeds(range(block * NUM_DECIDING_SEEDS, (block + 1) * NUM_DECIDING_SEEDS))


@pytest.mark.slow
def test_many_more_random_schedules_keep_every_invariant_and_converge() -> None:
    for seed in range(NUM_SEEDS, NUM_SEEDS + 3000):
        run_seed(seed)


def test_same_seed_gives_the_same_run_in_every_process() -> None:
    """Python hashes strings differently in each process, which changes the order of sets."""
    program = (
        "import test_rendezvous_schedules as schedules; print(*schedules.run_fencing_seed(192).trace, sep=chr(10))"
    )
    first, second = (
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=Path(__file__).parent,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in "03"
    )
    assert first == second
    assert "learns epoch 2" in first


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


def majority_of_the_unfenced(
    view: View | None,
    votes: set[MemberKey],
    gone: frozenset[MemberKey],
    fenced: frozenset[MemberKey],
    known: list[MemberKey],
    sizes: Sizes,
) -> bool:
    """A tempting rule: fenced members are left out of the count, and a majority of the others suffices."""
    whole = views.has_quorum(view, votes, gone, fenced, known, sizes)
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


def run_two_of_three_acceptors_restarted() -> Simulation:
    """a decides with b and c and is cut off then; b and c are restarted and meet d and e, who know nothing of it."""
    schedule = [
        Fault(2.0, "cut", "d,e"),
        Fault(2.0, "ambush"),
        Fault(2.0, "propose", "a"),
        *(Fault(2.2, "crash", name) for name in "bc"),
        Fault(2.3, "heal"),
        Fault(2.3, "cut", "a"),
        *(Fault(2.3, "restart", name) for name in "bc"),
    ]
    return scripted(schedule, "abcde", 6.0, num_nodes_min=1)


def run_assumed_dead_but_only_cut_off() -> Simulation:
    """Of two nodes one is cut off; an operator takes it for dead; it comes back."""
    schedule = [Fault(2.0, "cut", "b"), Fault(4.5, "assume_dead", "b"), Fault(5.5, "heal")]
    return scripted(schedule, "ab", 8.0, num_nodes_min=1)


def run_third_that_never_heard_of_the_fence() -> Simulation:
    """d and e are assumed dead by a and b, while c is cut off, and then meets d and e again."""
    schedule = [
        Fault(2.0, "cut", "a,b"),
        Fault(2.0, "cut", "c"),
        *(Fault(3.9, "assume_dead", f"{name}|a") for name in "de"),
        Fault(4.2, "heal"),
        Fault(4.2, "cut", "a,b"),
    ]
    return scripted(schedule, "abcde", 8.0, num_nodes_min=1)


def run_misspoken_and_dead() -> Simulation:
    """c speaks of a view that does not exist, and dies."""
    schedule = [Fault(2.0, "misspeak", "c"), Fault(2.0, "crash", "c")]
    return scripted(schedule, "abc", 5.0, num_nodes_min=1)


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
