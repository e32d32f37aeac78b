"""Which view comes next, and whose votes are enough for it. Pure functions.

Flows in: the previous view, who can be used, whose votes came in. Flows out: a plan, or a sentence why there is none.
Invariants: survivors keep their places; two vote sets that `has_quorum` accepts for one epoch share a voter that has
not lost its memory, so two values can never both be decided.
Limits: the first view has no previous one to count votes in. It counts names against the maximum size, so the numbers
given at start must be true, and an agent that is restarted must say so (`Config.rejoin`): one that does not is safe
only once a majority of the expected names has learned the first view. When more than half of a view's members die
within one decision, the others wait although the deaths are proven, until somebody vouches for their end
(`assume_dead`), unless the run was told that proof suffices.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from rendezvous.types import Member, MemberKey, Role, View


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many training nodes a view may have, and how many members the first one counts votes against.

    `proof_suffices`: whoever is proven dead is not needed for a quorum, however many they are.
    """

    num_nodes_min: int
    num_nodes_max: int
    max_size: int
    proof_suffices: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Who would be in the next view. `moved`: some place has another occupant than before."""

    places: tuple[Member, ...]
    spares: tuple[Member, ...]
    witnesses: tuple[Member, ...]
    moved: bool


def has_quorum(
    view: View | None,
    votes: AbstractSet[MemberKey],
    gone: AbstractSet[MemberKey],
    fenced: AbstractSet[MemberKey],
    known: Collection[MemberKey],
    sizes: Sizes,
) -> bool:
    """May `votes` decide the epoch after `view`?

    After a view: a majority of its members; or exactly half of them (a tie) when all the others are proven dead. Not
    fewer, even if the rest is proven dead: while this side was cut off, the rest may have gone on with new members
    before it died. `Sizes.proof_suffices` takes that risk. Fenced members are left out of the count, and then all
    others that are not proven dead must vote. So two such sets always share a member: two majorities do; the other
    half of a tie is dead for ever; and all but the fenced ones have voted, so that one that comes back decides nothing
    else, unless the fenced ones are enough without the others.
    """
    if view is None:
        names = {key.name for key in votes}
        num_replaced = len(set(known) | votes) - len({key.name for key in known} | names)
        needed = max(sizes.max_size, len({key.name for key in known} | names))
        return 2 * len(names) > needed + num_replaced or len(names) >= needed
    voters = view.keys - fenced if fenced else view.keys
    counted = votes & voters
    if 2 * len(counted) > len(view.keys):
        return True
    enough = sizes.proof_suffices or 2 * len(counted) >= len(voters)
    return bool(counted) and enough and voters - counted <= gone


def quorum_text(view: View | None, num_votes: int, sizes: Sizes) -> str:
    """The sentence for a missing quorum."""
    if view is None:
        size = sizes.max_size
        return (
            f"a run begins with more than half of the members it may have, so that no other half of them begins the "
            f"same run elsewhere: {size // 2 + 1} of {size} are needed (--nnodes' MAX, with expected spares and "
            f"witnesses) and {num_votes} came: waiting for more to join. If no more will come, start with a smaller MAX"
        )
    size = len(view.members)
    return (
        f"{size // 2 + 1} of {size} votes are needed and {num_votes} came: waiting for members to answer. Members that "
        "are merely silent may still be training, so nothing is decided without them. If one is gone for certain, say "
        "so with `p2prun assume-dead NAME` or let --fence find out; a spare node or a witness more is a vote more"
    )


def natural(name: str) -> list[tuple[int, str]]:
    """A sort key that puts node2 before node10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name) if part]


def plan_view(previous: View | None, usable: Sequence[Member], sizes: Sizes) -> Plan | str:
    """The next view's members, or the sentence that says what is missing.

    `usable`: every member that may be in it. Survivors keep their places, empty places go to spares, oldest first, that
    have as many workers as the others. New members wait as spares when no place is empty.
    """
    by_key = {member.key: member for member in usable}
    old_places = previous.places if previous else ()
    before = previous.keys if previous else frozenset()
    # A restarted agent waits until its predecessor is known to be dead: one name, one member.
    taken = {m.name for m in usable if m.key in before}
    newcomers = [m for m in usable if m.key not in before and m.name not in taken]
    oldest = {m.name: m for m in sorted(newcomers, key=lambda m: m.key, reverse=True)}
    fresh = list(oldest.values())
    nodes = [m for m in fresh if m.role is Role.NODE]
    if previous is None:
        nodes.sort(key=lambda m: (natural(m.name), m.key))
    else:
        nodes.sort(key=lambda m: (m.incarnation, m.name))
    pool = [m for m in (previous.spares if previous else ()) if m.key in by_key] + nodes
    num_workers = _num_workers(old_places, pool)
    fitting = [m for m in pool if m.num_workers == num_workers]
    slots: list[Member | None] = [m if m.key in by_key else None for m in old_places]
    slots += [None] * (sizes.num_nodes_max - len(slots))
    num_survivors = sum(slot is not None for slot in slots)
    for index, slot in enumerate(slots):
        if slot is None and fitting:
            slots[index] = fitting.pop(0)
    places = tuple(slot for slot in slots if slot is not None)
    if len(places) < sizes.num_nodes_min:
        return _shortage(sizes.num_nodes_min, num_survivors, pool, num_workers, previous)
    placed = {m.key for m in places}
    spares = tuple(m for m in pool if m.key not in placed)
    old_witnesses = [m for m in (previous.witnesses if previous else ()) if m.key in by_key]
    new_witnesses = sorted((m for m in fresh if m.role is Role.WITNESS), key=lambda m: (m.incarnation, m.name))
    moved = [m.key for m in places] != [m.key for m in old_places]
    return Plan(places, spares, (*old_witnesses, *new_witnesses), moved)


def make_view(
    previous: View | None, plan: Plan, nonce: str, reason: str, new_round: bool, data: dict[str, object]
) -> View:
    """The proposed view: next epoch, and a new round if the places changed or the application wants one."""
    epoch = previous.epoch + 1 if previous else 1
    round_ = epoch if previous is None or plan.moved or new_round else previous.round
    return View(
        previous.nonce if previous else nonce,
        epoch,
        round_,
        plan.places,
        plan.spares,
        plan.witnesses,
        reason,
        data,
    )


def _num_workers(places: Sequence[Member], pool: Sequence[Member]) -> int:
    """How many workers a place has: as before, else what most nodes bring (the greater of two equally common)."""
    if places:
        return places[0].num_workers
    counts = Counter(member.num_workers for member in pool)
    return max(counts, key=lambda number: (counts[number], number), default=0)


def _shortage(needed: int, num_survivors: int, pool: Sequence[Member], num_workers: int, previous: View | None) -> str:
    unfit = [m for m in pool if m.num_workers != num_workers]
    if previous is None:
        text = f"{needed} training nodes are needed, {len(pool)} joined"
    else:
        verb = "is" if num_survivors == 1 else "are"
        text = f"{needed} of {len(previous.places)} training nodes are needed, {num_survivors} {verb} alive"
        text += " and no spare is left" if not len(pool) - len(unfit) else " and the spares are too few"
    if unfit:
        text += f" ({unfit[0].name} has {unfit[0].num_workers} workers instead of {num_workers} and cannot step in)"
    return text + ": waiting for a node to join"
