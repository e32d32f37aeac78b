"""draining: two nodes that end at the same moment write one version, once, whichever of them hears the other first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from p2pstate.agent.draining import Draining
from p2pstate.types import Part, RoundInfo, SlotRecord, Version, Worker

NODES = ("a", "b")
WHOLE = Version(3, 13)
VOID = Version(3, 14)  # in all vaults, too, but round 4 has resumed the one before


class Saves:
    """What a node's saves are asked for."""

    configured, on_disk = True, None

    def __init__(self) -> None:
        self.leads: list[str] = []
        self.ended: Callable[[Version, str, str], None] = lambda version, error, name: None

    @property
    def busy(self) -> bool:
        return bool(self.leads)

    def is_saving(self, version: Version) -> bool:
        return self.busy and version == WHOLE

    is_gathering = is_saving

    def start(self, version: Version, reason: str, lead: str, *others: Any) -> None:
        assert version == WHOLE
        self.leads.append(lead)
        self.ended = others[-1]


class Wire:
    """Messages between the nodes, in the order that a test chooses."""

    def __init__(self) -> None:
        self.queues: dict[str, deque[tuple[str, Any]]] = {name: deque() for name in NODES}
        self.drainings: dict[str, Draining] = {}
        members = {name: SimpleNamespace(member=SimpleNamespace(name=name, num_workers=1), live=True) for name in NODES}
        self.nodes = {name: Node(self, name, members) for name in NODES}

    def deliver(self, first: str) -> None:
        """All there is, that of node ``first`` before the others'."""
        while any(self.queues.values()):
            to = next(name for name in sorted(NODES, key=lambda name: name != first) if self.queues[name])
            self.drainings[to].heard(*self.queues[to].popleft())  # type: ignore[arg-type]


class Node:
    def __init__(self, wire: Wire, name: str, members: Any) -> None:
        self._wire, self._name, self._members = wire, name, members

    def members(self) -> Any:
        return self._members

    def send(self, to: str, _kind: str, body: Any) -> None:
        self._wire.queues[to].append((self._name, body))

    def broadcast(self, kind: str, body: Any) -> None:
        for name in NODES:
            if name != self._name:
                self.send(name, kind, body)

    def call_later(self, _seconds: float, _function: Callable[[], None]) -> None:
        """Nothing here has to be repeated."""


@pytest.mark.parametrize("first", NODES)
@pytest.mark.parametrize("later", [False, True], ids=["at once", "one after the other"])
def test_two_nodes_that_end_together_agree_on_who_leads_the_save(first: str, later: bool) -> None:
    wire, saves, said, lineage = Wire(), {name: Saves() for name in NODES}, [], {4: list(WHOLE)}
    info = RoundInfo(
        "run", "nonce", 3, "fresh", "", tuple(Worker(rank, 0, name, "127.0.0.1") for rank, name in enumerate(NODES))
    )
    for rank, name in enumerate(NODES):
        held = enumerate((WHOLE, VOID))
        records = [SlotRecord(name, slot, Part.own(rank), version, 100, "00", 0) for slot, version in held]
        vault = SimpleNamespace(records=lambda records=records: records)
        events = SimpleNamespace(emit=lambda *text, name=name, **fields: said.append((name, fields["text"])))
        wire.drainings[name] = Draining(wire.nodes[name], vault, events, saves[name], lineage, name)  # type: ignore[arg-type]
    over = []
    for name in NODES if first == "a" else reversed(NODES):
        wire.drainings[name].start(info, "SIGTERM", partial(over.append, name), training=False)
        if later:
            wire.deliver(first)
    wire.deliver(first)
    assert len({save.leads[-1] for save in saves.values()}) == 1, {name: save.leads for name, save in saves.items()}
    for name in NODES:
        saves[name].ended(WHOLE, "", "000004-step13")
    assert sorted(over) == list(NODES)
    assert said == [(name, "step 13 is on disk (000004-step13)") for name in NODES]
