"""Runs of a simulated cluster of real cores, under a random or a scripted schedule of faults."""

from __future__ import annotations

import random

from rendezvous.faults import Fault, random_schedule
from rendezvous.testing import Simulation

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
