"""A view as what it has that the one before it has not, so that a decision costs each member what changed. Pure.

Flows in: a view and the one before it. Flows out: a `ViewDelta`, or the view made from one.
Invariants: `apply_delta(previous, delta_of(previous, view)) == view` for views of one run; a delta that does not fit
gives none. Whoever holds epoch e holds the same view of it as everybody else, so a delta means the same to all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rendezvous.plain import count_from, counter_from, list_from, table_from, text_from
from rendezvous.types import Member, View

# Members of the previous view in its order, from `first` on; or one that is new.
Kept: TypeAlias = tuple[int, int]  # first, how many
Piece: TypeAlias = Kept | Member


@dataclass(frozen=True, slots=True)
class ViewDelta:
    """`groups` are places, spares and witnesses."""

    epoch: int
    round: int
    groups: tuple[tuple[Piece, ...], ...]
    reason: str
    data: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def to_plain(self) -> list[Any]:
        groups = [
            [piece.to_plain() if isinstance(piece, Member) else list(piece) for piece in group] for group in self.groups
        ]
        return [self.epoch, self.round, groups, self.reason, dict(self.data)]

    @staticmethod
    def from_plain(value: object) -> ViewDelta:
        epoch, round_, groups, reason, data = list_from(value, "a view delta", 5)
        return ViewDelta(
            counter_from(epoch, "an epoch"),
            counter_from(round_, "a round"),
            tuple(
                tuple(_piece_from(piece) for piece in list_from(group, "a group"))
                for group in list_from(groups, "groups", 3)
            ),
            text_from(reason, "a reason"),
            table_from(data, "view data"),
        )


def _piece_from(value: object) -> Piece:
    if isinstance(value, list) and len(value) == 2:
        return count_from(value[0], "an index"), count_from(value[1], "a number")
    return Member.from_plain(value)


def delta_of(previous: View, view: View) -> ViewDelta:
    """`view` seen from `previous`, which has the epoch before it and the same nonce."""
    assert (view.epoch, view.nonce) == (previous.epoch + 1, previous.nonce), "a delta follows the view before it"
    index = {member.key: at for at, member in enumerate(previous.members)}
    old = previous.members
    groups = tuple(tuple(_pieces(group, old, index)) for group in (view.places, view.spares, view.witnesses))
    return ViewDelta(view.epoch, view.round, groups, view.reason, view.data)


def _pieces(group: Sequence[Member], old: Sequence[Member], index: Mapping[Any, int]) -> Iterator[Piece]:
    first = count = 0
    for member in group:
        at = index.get(member.key)
        if at is not None and old[at] == member and count and at == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = at or 0, 1
        if at is None or old[at] != member:
            yield member
            count = 0
    if count:
        yield first, count


def apply_delta(previous: View, delta: ViewDelta) -> View | None:
    """The view that `delta` stands for; None if it does not fit to `previous`."""
    if delta.epoch != previous.epoch + 1 or not 1 <= delta.round <= delta.epoch or len(delta.groups) != 3:
        return None
    old = previous.members
    groups: list[tuple[Member, ...]] = []
    for group in delta.groups:
        members: list[Member] = []
        for piece in group:
            if isinstance(piece, Member):
                members.append(piece)
            elif piece[0] + piece[1] <= len(old) and len(members) <= len(old) + len(group):
                members += old[piece[0] : piece[0] + piece[1]]
            else:
                return None
        groups.append(tuple(members))
    places, spares, witnesses = groups
    view = View(previous.nonce, delta.epoch, delta.round, places, spares, witnesses, delta.reason, delta.data)
    return view if len(view.keys) == len(view.members) else None
