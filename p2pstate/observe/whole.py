"""What the nodes of a run told, put together: the state of the whole run as one plain table. Pure.

In: what each node answered (agent/serving.py gathers it). Out: :func:`merge`, for pages and programs, and
:func:`headline`, the same in a few words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from p2pstate.observe.goodput import Goodput
from p2pstate.observe.incidents import longest
from p2pstate.observe.skew import WINDOW_STEPS, Load, Skew, judge
from rendezvous.standing import newest_view, part_of

__all__ = ["WINDOWS", "headline", "merge"]

WINDOWS = {"now": "last minute", "hour": "last hour", "run": "whole run"}


def merge(answers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """``answers``: by the name of the node, as far as they came. At least one."""
    view = newest_view(answers.values())
    members = {name: member for answer in answers.values() for name, member in answer["members"].items()}
    seconds = {window: _sum(answer["live"]["seconds"][window] for answer in answers.values()) for window in WINDOWS}
    fetches = [answer["live"]["fetch_p95_s"] for answer in answers.values()]
    verdicts = [answer["verdict"] for answer in answers.values() if answer["verdict"] is not None]
    saved = [answer["live"]["on_disk"] for answer in answers.values() if answer["live"]["on_disk"] is not None]
    skew = _skew(answers.values())
    slow = {} if skew is None else dict(skew.stragglers)
    slow |= {rank: reason for answer in answers.values() for rank, reason in answer["live"]["slow"]}
    ranks = [rank | {"node": name} for name, answer in answers.items() for rank in answer["ranks"]]
    return {
        "run_id": next(iter(answers.values()))["run_id"],
        "view": view,
        "verdict": verdicts[0] if verdicts else None,
        "nodes": [_node(name, answers.get(name), view, members[name]) for name in sorted(members)],
        "ranks": sorted(ranks, key=lambda rank: int(rank["rank"])),
        "waiting": sorted({answer["waiting"] for answer in answers.values() if answer["waiting"]}),
        "weaknesses": sorted({text for answer in answers.values() for text in answer["weaknesses"]}),
        "goodput": {window: {"ratio": Goodput(found).ratio, "seconds": found} for window, found in seconds.items()},
        "incidents": _incidents(answers.values()),
        "num_incidents": max(answer["live"]["num_incidents"] for answer in answers.values()),
        "on_disk": max(saved, key=lambda each: int(each["step"]), default=None),
        "skew": None if skew is None else asdict(skew),
        "starved": [] if skew is None else [[rank, reason] for rank, reason in skew.starved.items()],
        "slow": [[rank, reason] for rank, reason in sorted(slow.items())],
        "fetch_p95_s": max((value for value in fetches if value is not None), default=None),
    }


def _sum(parts: Any) -> dict[str, float]:
    sums: Counter[str] = Counter()
    for part in parts:
        sums.update(part)
    return dict(sums)


def _skew(answers: Collection[Mapping[str, Any]]) -> Skew | None:
    """Of the newest window that all ranks have gone through."""
    windows: dict[int, dict[int, Load]] = {}
    for first, rank, *load in (each for answer in answers for each in answer["live"]["loads"]):
        windows.setdefault(first, {})[rank] = Load(*load)
    ranks = {rank["rank"] for answer in answers for rank in answer["ranks"]}
    newest = min((rank["step"] or 0 for answer in answers for rank in answer["ranks"]), default=0)
    past = [first for first in windows if first + WINDOW_STEPS - 1 <= newest and windows[first].keys() >= ranks]
    return judge(max(past), windows[max(past)]) if past else None


def _incidents(answers: Collection[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each round that ended the account of the node that knows most about it, the newest first. What only nodes
    without ranks have seen as a failure of its own was part of one to the others, unless there are no others."""
    told = [incident for answer in answers for incident in answer["live"]["incidents"]]
    if any(answer["ranks"] for answer in answers):
        rounds = {incident["round"] for incident in told if not incident["looked_on"]}
        told = [incident for incident in told if incident["round"] in rounds]
    best: dict[int, dict[str, Any]] = {}
    causes = ("other", "process", "hang", "node")
    for incident in told:
        known = best.get(incident["round"])
        if known is None:
            best[incident["round"]] = dict(incident)
            continue
        fuller, other = sorted((known, incident), key=lambda each: (each["seconds"] or 0.0, len(each["phases"])))[::-1]
        cause = max(fuller["cause"], other["cause"], key=causes.index)
        replaced = sorted({*fuller["replaced"], *other["replaced"]})
        source = other["source"] if other["replaced"] and not fuller["replaced"] else fuller["source"]
        protection = [each["protected_s"] for each in (known, incident) if each["ranks"]]
        best[incident["round"]] = {
            **fuller,
            "phases": longest(fuller["phases"], other["phases"]),
            "bytes": fuller["bytes"] + other["bytes"],  # each tells of its own ranks
            "steps_lost": max(fuller["steps_lost"], other["steps_lost"]),
            "cause": cause,
            "replaced": replaced,
            "source": source,
            "ranks": sorted({*fuller["ranks"], *other["ranks"]}),
            "protected_s": None if None in protection else max(protection, default=None),
        }
    return sorted(best.values(), key=lambda each: float(each["s_ago"]))


def _node(
    name: str, answer: Mapping[str, Any] | None, view: Mapping[str, Any] | None, member: Mapping[str, Any]
) -> dict[str, Any]:
    part = part_of(name, view)
    return {
        "name": name,
        "address": member["address"],
        "part": part,
        "state": member["state"],
        "reason": member["reason"],
        "answered": answer is not None,
        "page": answer["page"] if answer is not None else None,
        "num_warm": answer["num_warm"] if answer is not None else None,
        "vault_bytes": answer["vault_bytes"] if answer is not None else None,
        "if_it_dies": _if_it_dies(name, part, answer, view),
    }


def _if_it_dies(name: str, part: str, answer: Mapping[str, Any] | None, view: Mapping[str, Any] | None) -> str:
    """What happens to the run if this node dies now."""
    if view is None or part == "not in the view":
        return "nothing: it has no part in the run"
    if part == "witness":
        return "training goes on, with a vote less"
    if part == "spare":
        left = len(view["spares"]) - 1
        return f"training goes on, with {left or 'no'} spare node{'s' * (left != 1)} left"
    if len(view["places"]) == 1 and not view["spares"]:
        return "the run is lost: no other node has copies"
    protected = [rank["protected"] for rank in answer["ranks"]] if answer is not None else []
    if not protected or None in protected:
        return "not protected yet: the run begins again, or from its newest checkpoint"
    resumes = f"all resume step {min(protected)} from the copies on other nodes"
    if view["spares"]:
        return f"{view['spares'][0]} takes its ranks, {resumes}"
    return f"the run waits for a node, then {resumes}"


def headline(run: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether all is well, and the run's state in a few words."""
    if run["verdict"] is not None:
        return run["verdict"]["code"] == 0, f"ended: {run['verdict']['text']}"
    if run["view"] is None:
        return False, "waiting for the first nodes"
    if run["waiting"]:
        return False, "waiting for a node"
    newest = run["incidents"][0] if run["incidents"] else None
    if newest is not None and newest["seconds"] is None:
        return False, "recovering"
    if not run["ranks"] or any(rank["protected"] is None for rank in run["ranks"]):
        begun = any(rank["step"] for rank in run["ranks"])
        return False, "training, not protected yet" if begun else "starting, not protected yet"
    return True, "training, protected"
