"""The state of a run as a page that anybody may look at, and the same for the terminal.

In: what each node answered (agent/serving.py gathers it), which node was asked. Out: :func:`merge`, one plain table of
the whole run, and :func:`as_page`, HTML without scripts that loads nothing and renews itself. What comes from other
nodes is escaped. Every state is told in words; colour only repeats it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from p2pstate.observe import svg
from p2pstate.observe.goodput import CATEGORIES, Goodput
from rendezvous.standing import newest_view

__all__ = ["WINDOWS", "as_page", "headline", "merge"]

RENEW_S = 2
WINDOWS = {"now": "last minute", "hour": "last hour", "run": "whole run"}

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 1em auto; max-width: 1000px; padding: 0 1em; color: #222; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin-top: 1.6em; } .state { font-weight: 600; font-size: 1.15em; }
.bad, .good { border-left: .4em solid #d55e00; padding-left: .6em; } .good { border-color: #009e73; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; } td, th { padding: .2em .9em .2em 0; text-align: left;
vertical-align: top; }
svg { width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: currentColor; }
.legend span { margin-right: 1.2em; white-space: nowrap; } .legend i { display: inline-block; width: .9em; height: .9em;
margin-right: .4em; border: 1px solid #555; }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd; } a { color: #8cf; } }
"""


def merge(answers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """``answers``: by the name of the node, as far as they came. At least one."""
    view = newest_view(answers.values())
    members = {name: member for answer in answers.values() for name, member in answer["members"].items()}
    seconds = {window: _sum(answer["live"]["seconds"][window] for answer in answers.values()) for window in WINDOWS}
    fetches = [answer["live"]["fetch_p95_s"] for answer in answers.values()]
    verdicts = [answer["verdict"] for answer in answers.values() if answer["verdict"] is not None]
    saved = [answer["live"]["on_disk"] for answer in answers.values() if answer["live"]["on_disk"] is not None]
    slow = {rank: reason for answer in answers.values() for rank, reason in answer["live"]["slow"]}
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
        "incidents": _incidents(answer["live"]["incidents"] for answer in answers.values()),
        "on_disk": max(saved, key=lambda each: int(each["step"]), default=None),
        "slow": [[rank, reason] for rank, reason in sorted(slow.items())],
        "fetch_p95_s": max((value for value in fetches if value is not None), default=None),
    }


def _sum(parts: Any) -> dict[str, float]:
    sums: Counter[str] = Counter()
    for part in parts:
        sums.update(part)
    return dict(sums)


def _incidents(told: Any) -> list[dict[str, Any]]:
    """Of each round that ended the account of the node that knows most about it, the newest first."""
    best: dict[int, dict[str, Any]] = {}
    causes = ("other", "process", "hang", "node")
    for incident in (each for part in told for each in part):
        known = best.get(incident["round"])
        if known is None:
            best[incident["round"]] = dict(incident)
            continue
        fuller, other = sorted((known, incident), key=lambda each: (each["seconds"] or 0.0, len(each["phases"])))[::-1]
        cause = max(fuller["cause"], other["cause"], key=causes.index)
        replaced = sorted({*fuller["replaced"], *other["replaced"]})
        source = other["source"] if other["replaced"] and not fuller["replaced"] else fuller["source"]
        best[incident["round"]] = {**fuller, "cause": cause, "replaced": replaced, "source": source}
    return sorted(best.values(), key=lambda each: float(each["s_ago"]))


def _node(
    name: str, answer: Mapping[str, Any] | None, view: Mapping[str, Any] | None, member: Mapping[str, Any]
) -> dict[str, Any]:
    parts = {"places": "training", "spares": "spare", "witnesses": "witness"}
    part = next((word for key, word in parts.items() if view is not None and name in view[key]), "not in the view")
    return {
        "name": name,
        "address": member["address"],
        "part": part,
        "state": member["state"],
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
        return f"training goes on, with {len(view['spares']) - 1} spare nodes left"
    if len(view["places"]) == 1 and not view["spares"]:
        return "the run is lost: no other node has copies"
    protected = [rank["protected"] for rank in answer["ranks"]] if answer is not None else []
    if not protected or None in protected:
        return "not protected yet: the run begins again, or from its newest checkpoint"
    resumes = f"all resume step {min(protected)} from the copies on other nodes"
    if view["spares"]:
        return f"{view['spares'][0]} takes its ranks, {resumes}"
    return f"the run waits for a node, then {resumes}"


def as_page(run: Mapping[str, Any], asked: str) -> str:
    """``run``: from :func:`merge`; ``asked``: the node that serves this page."""
    sections = [
        ("Nodes", _nodes(run, asked)),
        ("Ranks", _ranks(run)),
        ("Failures", _failures(run)),
        ("Where the time went", _goodput(run)),
    ]
    title = f"{headline(run)[1]} · {run['run_id']}"
    body = "".join(f"<h2>{escape(name)}</h2>{content}" for name, content in sections)
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="refresh" content="{RENEW_S}"><title>{escape(title)}</title><style>{STYLE}</style>'
    )
    first = f"<h1>Run {escape(str(run['run_id']))}</h1>{_state(run)}"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{first}{body}</body></html>'


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
        return False, "starting, not protected yet"
    return True, "training, protected"


def _state(run: Mapping[str, Any]) -> str:
    well, text = headline(run)
    lines = [f'<p class="state {"good" if well else "bad"}">{escape(text)}</p>']
    if run["incidents"] and run["verdict"] is None:
        newest = run["incidents"][0]
        took = "not over yet" if newest["seconds"] is None else f"survived in {newest['seconds']:.2f} s"
        text = f"newest failure {newest['s_ago']:.0f} s ago: {newest['reason']}; {took}"
        lines.append(f"<p>{escape(text)}, {newest['steps_lost']} committed steps lost</p>")
    if run["on_disk"] is not None:
        lines.append(f"<p>on disk: step {run['on_disk']['step']}, for {run['on_disk']['s_ago']:.0f} s</p>")
    notes = [f"waiting: {text}" for text in run["waiting"]] + [f"weak: {text}" for text in run["weaknesses"]]
    notes += [f"rank {rank} is slow: {reason}" for rank, reason in run["slow"]]
    return "".join(lines) + "".join(f'<p class="bad">{escape(note)}</p>' for note in notes)


def _nodes(run: Mapping[str, Any], asked: str) -> str:
    rows = []
    for node in run["nodes"]:
        name = escape(node["name"])
        if node["page"] and node["name"] != asked:
            name = f'<a href="{escape(node["page"], quote=True)}">{name}</a>'
        state = node["state"] if node["answered"] or node["part"] == "witness" else f"{node['state']}, did not answer"
        size = "" if node["vault_bytes"] is None else f"{node['vault_bytes'] / 2**20:.1f} MiB"
        cells = (node["part"], state, size, "" if node["num_warm"] is None else str(node["num_warm"]))
        rest = "".join(f"<td>{escape(cell)}</td>" for cell in (*cells, node["if_it_dies"]))
        rows.append(f"<tr><td>{name}{' (this page)' if node['name'] == asked else ''}</td>{rest}</tr>")
    head = ("node", "part", "state", "copies", "warm processes", "if it dies now")
    return _table(head, rows)


def _ranks(run: Mapping[str, Any]) -> str:
    rows = []
    for rank in run["ranks"]:
        protected = "nothing yet" if rank["protected"] is None else f"step {rank['protected']}"
        lag = "" if rank["protected"] is None or rank["step"] is None else str(rank["step"] - rank["protected"])
        ago = "" if rank["told_s_ago"] is None else f"{rank['told_s_ago']:.1f} s ago"
        step = "" if rank["step"] is None else str(rank["step"])
        cells = (str(rank["rank"]), rank["node"], str(rank["pid"]), rank["phase"], step, ago, protected, lag)
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return _table(("rank", "node", "process", "phase", "step", "committed", "protected", "lag"), rows)


def _failures(run: Mapping[str, Any]) -> str:
    if not run["incidents"]:
        return "<p>None.</p>"
    rows, drawn = [], []
    for incident in run["incidents"]:
        took = "not over" if incident["seconds"] is None else f"{incident['seconds']:.2f} s"
        replaced = ", ".join(map(str, incident["replaced"])) or "none"
        cells = [f"{incident['s_ago']:.0f} s ago", incident["cause"], incident["reason"], replaced, incident["source"]]
        cells += [f"{incident['bytes'] / 1e6:.1f} MB", str(incident["steps_lost"]), took]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
        drawn.append((f"{incident['s_ago']:.0f} s ago: {incident['cause']}", incident["phases"], took))
    head = ("when", "what", "why", "ranks replaced", "state from", "sent", "steps lost", "took")
    largest = max(sum(phases.values()) for _, phases, _ in drawn)
    return _table(head, rows) + svg.bars(drawn, largest)


def _goodput(run: Mapping[str, Any]) -> str:
    rows = []
    for window, title in WINDOWS.items():
        found = Goodput(run["goodput"][window]["seconds"])
        lost = ", ".join(
            f"{CATEGORIES[category]} {100 * seconds / found.wall_s:.1f} %"
            for category, seconds in found.by_category().items()
            if category != "useful"
        )
        rows.append(f"<tr><td>{title}</td><td>{100 * found.ratio:.1f} %</td><td>{escape(lost)}</td></tr>")
    fetch = run["fetch_p95_s"]
    note = "" if fetch is None else f"<p>95 of 100 batches came within {fetch:.4f} s.</p>"
    return _table(("", "goodput", "the rest"), rows) + note


def _table(head: Sequence[str], rows: Sequence[str]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    return f'<div class="scroll"><table><tr>{top}</tr>{"".join(rows)}</table></div>'
