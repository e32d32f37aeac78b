"""Faults as data, for simulations: what happens when, and random schedules of it.

Flows in: a seeded random source. Flows out: sorted faults. Invariants: the same seed gives the same schedule.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """`kind` happens at `at_s` to `who`.

    crash, restart, pause, resume, leave, propose (who: a name); misspeak (who says once that it knows a view that does
    not exist); twin (a second node is given the name that one has); cut (who: the names of one side, "a,b", or of both,
    "a|b,c"), cut_one_way (from the first name to all others), heal; ambush (the next node that completes a decision
    loses what it then sends and is cut off), ambush_crash (it crashes instead); strike_cut, strike_crash (as soon as a
    proposal is under way somewhere, a random side is cut off, or its proposer or another node crashes; `who` has then
    no meaning); loss (amount: share of messages lost), calm; assume_dead (an operator says so to somebody who
    does not hear from it, or to the one named after a bar, "d|a", if nothing that it began goes on).
    """

    at_s: float
    kind: str
    who: str = ""
    amount: float = 0.0


_RANDOM_KINDS = (
    "crash",
    "crash",
    "pause",
    "cut",
    "cut",
    "cut_one_way",
    "loss",
    "loss",
    "propose",
    "propose",
    "leave",
    "ambush",
    "ambush_crash",
)
_ENDS = {"crash": "restart", "pause": "resume", "cut": "heal", "cut_one_way": "heal", "ambush": "heal", "loss": "calm"}


def random_schedule(rng: random.Random, names: Sequence[str], until_s: float, num_faults: int) -> tuple[Fault, ...]:
    """Faults at random times, often several within one decision; all but crashes and departures end by `until_s`."""
    faults: list[Fault] = []
    at_s = rng.uniform(0.0, until_s)
    for _ in range(num_faults):
        # A decision takes some 50 ms: the next fault hits the same one, or comes at any time.
        at_s = min(until_s, at_s + rng.expovariate(40.0)) if rng.random() < 0.7 else rng.uniform(0.0, until_s)
        kind = rng.choice(_RANDOM_KINDS)
        end_s = min(until_s, at_s + rng.expovariate(2.0 if rng.random() < 0.5 else 20.0))
        who = rng.choice(names)
        if kind in ("cut", "cut_one_way"):
            who = ",".join(rng.sample(list(names), rng.randint(1, max(1, len(names) // 2))))
        faults.append(Fault(at_s, kind, who, rng.uniform(0.05, 0.8)))
        end = _ENDS.get(kind)
        if end is not None and (end != "restart" or rng.random() < 0.7):
            faults.append(Fault(end_s, end, who if end in ("restart", "resume") else ""))
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def fencing_schedule(
    rng: random.Random, names: Sequence[str], until_s: float
) -> tuple[tuple[Fault, ...], frozenset[str]]:
    """Some members fall silent, an operator assumes their death, and they come back. -> (faults, those members).

    One of the others never crashes, and those that come back are not more than half of all.
    """
    keeper, *rest = rng.sample(list(names), len(names))
    silent = rest[: rng.randint(1, len(rest))]
    num_returning = rng.randint(1, max(1, min(len(silent), len(names) // 2)))
    at_s = rng.uniform(0.6, 1.0)
    word_s = at_s + rng.uniform(0.9, 2.0)
    faults = [Fault(at_s, "crash", name) for name in silent[num_returning:]]
    back_s = word_s + rng.choice((rng.uniform(0.0, 0.2), rng.uniform(0.0, 1.0)))
    if rng.random() < 0.5:
        faults += [Fault(at_s, "cut", ",".join(silent[:num_returning])), Fault(back_s, "heal")]
    else:
        for name in silent[:num_returning]:
            faults += [Fault(at_s, "pause", name), Fault(back_s + rng.uniform(0.0, 0.3), "resume", name)]
    for name in silent:
        told_s = word_s + rng.uniform(0.0, 0.1)
        faults += [Fault(told_s + again_s, "assume_dead", name) for again_s in (0.0, 0.4, 0.8)]
    others = [name for name in rest if name not in silent]
    if others and rng.random() < 0.5:
        faults.append(Fault(rng.uniform(at_s, until_s), "crash", rng.choice(others)))
    if rng.random() < 0.5:
        faults += [Fault(rng.uniform(0.0, until_s), "loss", amount=rng.uniform(0.05, 0.5))]
    faults += [Fault(rng.uniform(at_s, until_s), "propose", rng.choice([keeper, *others])) for _ in range(2)]
    return tuple(sorted(faults, key=lambda fault: fault.at_s)), frozenset(silent)


def deciding_schedule(rng: random.Random, names: Sequence[str], until_s: float, num_faults: int) -> tuple[Fault, ...]:
    """A random schedule in which a partition and a crash also hit a decision while it is being made.

    In some, a member also speaks of a view that does not exist, and dies.
    """
    faults = list(random_schedule(rng, names, until_s, num_faults))
    for kind in ("strike_cut", "strike_crash"):
        at_s = rng.uniform(0.0, 0.6 * until_s)
        faults.append(Fault(at_s, kind))
        faults += [Fault(at_s, "propose", name) for name in rng.sample(list(names), 2)]
    faults.append(Fault(rng.uniform(0.7, 1.0) * until_s, "heal"))
    if rng.random() < 0.1:
        at_s, name = rng.uniform(0.3, 1.0) * until_s, rng.choice(names)
        faults += [Fault(at_s, "misspeak", name), Fault(at_s, "crash", name)]  # it will not take that back
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def with_twin(rng: random.Random, schedule: Sequence[Fault], names: Sequence[str], until_s: float) -> tuple[Fault, ...]:
    """The schedule, and a second live node that has the name of another one; in some runs either dies later."""
    name = rng.choice(list(names))
    faults = [*schedule, Fault(rng.uniform(0.0, 0.8 * until_s), "twin", name)]
    if rng.random() < 0.5:
        faults.append(Fault(rng.uniform(0.5, 1.0) * until_s, "crash", name if rng.random() < 0.5 else name + "'"))
    return tuple(sorted(faults, key=lambda fault: fault.at_s))
