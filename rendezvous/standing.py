"""What a node can tell an outsider about its run, as a plain table.

Flows in: a node. Flows out: names, addresses, states, the newest view, the verdict.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from rendezvous.membership import Record
from rendezvous.node import Node
from rendezvous.types import MemberKey


def standing_of(node: Node) -> dict[str, Any]:
    """`members`: name -> address, role, state, seconds since it was heard, progress; see `latest_lives`."""
    now, view, verdict = time.monotonic(), node.view, node.verdict
    members: dict[str, dict[str, Any]] = {}
    for key, record in latest_lives(node.members()).items():
        members[key.name] = {
            "address": record.member.address,
            "role": str(record.member.role),
            "state": "alive" if key == node.key else record.status.name.lower(),
            "silent_s": 0.0 if key == node.key else max(0.0, now - record.heard_s),
            "reason": "" if record.live else record.reason,
            "progress": dict(record.progress),
        }
    return {
        "name": node.key.name,
        "run_id": node.config.run_id,
        "members": members,
        "view": None
        if view is None
        else {
            "epoch": view.epoch,
            "round": view.round,
            "places": [member.name for member in view.places],
            "spares": [member.name for member in view.spares],
            "witnesses": [member.name for member in view.witnesses],
            "reason": view.reason,
        },
        "verdict": None if verdict is None else {"code": verdict.code, "text": verdict.text},
        "quorate": node.quorate,
    }


def latest_lives(members: Mapping[MemberKey, Record]) -> dict[MemberKey, Record]:
    """One of each name: who lives, else the newest incarnation (a clock may have been set back before a restart)."""
    ordered = sorted(members.items(), key=lambda item: (item[1].live, item[0]))
    return dict({key.name: (key, record) for key, record in ordered}.values())


def part_of(name: str, view: Mapping[str, Any] | None) -> str:
    """What a member does in a view (as `standing_of` tells it), in a word or a few."""
    parts = {"places": "training", "spares": "spare", "witnesses": "witness"}
    return next((word for key, word in parts.items() if view is not None and name in view[key]), "not in the view")


def newest_view(standings: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Of what several nodes have told; None while no view was decided."""
    views = [standing["view"] for standing in standings if standing["view"] is not None]
    return max(views, key=lambda view: int(view["epoch"]), default=None)
