"""What every decided view must fulfil, whatever happened on the way. Pure.

Flows in: a view, the one before it, who accepted it. Flows out: what is wrong, or None.
Limits: written apart from views.py and agreement.py on purpose, from the rules and not from the code.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from rendezvous.types import MemberKey, View


def wrong_with(
    view: View,
    before: View | None,
    voters: Sequence[AbstractSet[MemberKey]],
    num_names: int,
    num_places_min: int,
    num_places_max: int,
    vouched: AbstractSet[MemberKey] = frozenset(),
) -> str | None:
    """Why `view` must not have been decided after `before`.

    `voters`: who accepted it, for each ballot; `vouched`: whose death an operator has vouched for.
    """
    names = [member.name for member in view.members]
    if len(set(names)) != len(names):
        return f"has a name twice: {names}"
    if not num_places_min <= len(view.places) <= num_places_max:
        return f"has {len(view.places)} places"
    if before is None:
        if view.epoch != 1:
            return "follows no decided one"
        enough = any(2 * len({key.name for key in keys}) > num_names for keys in voters)
        return None if enough else f"was decided by too few: {voters}"
    counts = before.keys, before.keys - vouched
    if not any(2 * len(keys & counted) >= len(counted) > 0 for keys in voters for counted in counts):
        return f"was decided by too few: {voters}"
    if view.nonce != before.nonce:
        return "changed the nonce"
    old, new = [m.key for m in before.places], [m.key for m in view.places]
    if [key for key in new if key in old] != [key for key in old if key in new]:
        return "moved survivors"
    if [key for key in old if key in view.keys and key not in new]:
        return "took a place from a survivor"
    if view.round not in ((before.round, view.epoch) if old == new else (view.epoch,)):
        return f"has the round {view.round}"
    return None
