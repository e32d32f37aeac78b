"""The state of a run as a page that anybody may look at.

In: the whole run (whole.py), which node was asked. Out: HTML that loads nothing from elsewhere, and renews itself in
place (page.js; without scripts by loading itself again). What comes from nodes is escaped, and the policy that goes
with the page lets no other script run. Every state is told in words; colour only repeats it.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Iterable, Mapping
from html import escape
from importlib.resources import files
from typing import Any
from urllib.parse import quote

from p2pstate.observe.goodput import CATEGORIES, Goodput
from p2pstate.observe.incidents import PHASES
from p2pstate.observe.svg import COLOURS, PHASE_COLOURS
from p2pstate.observe.whole import WINDOWS, headline
from p2pstate.sizes import size_text

__all__ = ["POLICY", "as_page"]

STYLE = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
SCRIPT = files(__package__).joinpath("page.js").read_text(encoding="utf-8")
SCRIPT_DIGEST = b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{SCRIPT_DIGEST}'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
RENEW_S = 2  # without scripts
WHAT_DIED = {"process": "a worker process", "node": "a whole node", "hang": "a worker that hung", "other": "no process"}
SOURCES = {
    "own vault": "its own node's memory",
    "buddy": "the other node that keeps its copy",
    "replicas": "ranks that hold the same",
    "disk": "a checkpoint on disk",
    "survivor": "its own process, which lives",
}
DOING = {
    "starting": "starting",
    "fresh": "starting",
    "alone": "joining",
    "loop": "training",
    "rerun": "running",
    "done": "ending",
    "finished": "finished",
}
LEAST_SHOWN_S = 0.005


def as_page(run: Mapping[str, Any], asked: str, token: str = "") -> str:
    """``run``: from whole.merge; ``asked``: the node that serves this page; ``token``: that links to others take
    along."""
    well, state = headline(run)
    name = escape(str(run["run_id"]))
    failures = run["incidents"]
    body = "".join(
        [
            f"<h1>{name} <small>run, as {escape(asked)} sees it</small></h1>",
            f'<div class="state {"good" if well else "bad"}"><strong>{"✓" if well else "!"} {escape(state)}</strong>',
            f"<p>{escape(_explanation(run))}</p></div>",
            *(f'<div class="note">{escape(note)}</div>' for note in _notes(run)),
            f"<h2>Newest failure</h2>{_failure(failures[0], run)}" if failures else "",
            _tiles(run),
            f'<h2>Nodes and ranks</h2><div class="nodes">{_nodes(run, asked, token)}</div>',
            f"<h2>Where the time went</h2>{_goodput(run)}",
            "<h2>Failures before</h2>" if failures[1:] else "",
            *(_failure(each, run) for each in failures[1:]),
            "" if failures else '<p class="small">No failure so far.</p>',
        ]
    )
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<noscript><meta http-equiv="refresh" content="{RENEW_S}"></noscript>'
        f"<title>{escape(state)} · {name}</title><style>{STYLE}</style>"
    )
    main = f'<main data-node="{escape(asked, quote=True)}">{body}</main>'
    content = f'<p id="gone" role="alert" hidden></p>{main}<script>{SCRIPT}</script>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{content}</body></html>'


def _explanation(run: Mapping[str, Any]) -> str:
    """What the headline means for whoever reads it."""
    if run["verdict"] is not None:
        return f"Exit code {run['verdict']['code']}. Nothing of the run is in memory any more."
    if run["view"] is None or run["waiting"]:
        return "No training at the moment; what is missing stands below."
    if headline(run)[0]:
        lost = [node["if_it_dies"] for node in run["nodes"] if node["if_it_dies"].startswith("the run is lost")]
        step = min(rank["protected"] for rank in run["ranks"])
        if lost:
            return f"A process that dies is replaced from memory. If the node dies, {lost[0]}."
        resume = f"Any one node may die now: all ranks resume step {step} from memory"
        return f"{resume}." if _spares(run) else f"{resume}, once another node has joined (no spare is left)."
    newest = run["incidents"][0] if run["incidents"] else None
    if newest is not None and newest["seconds"] is None:
        return f"{newest['reason']}, {newest['s_ago']:.0f} s ago. Training has not gone on yet."
    return "Until copies of every rank's state are on two nodes, a failure may cost more than a step."


def _spares(run: Mapping[str, Any]) -> list[str]:
    return [node["name"] for node in run["nodes"] if node["part"] == "spare" and node["state"] == "alive"]


def _notes(run: Mapping[str, Any]) -> list[str]:
    notes = [f"Waiting: {text}" for text in run["waiting"]] + [f"Weak: {text}" for text in run["weaknesses"]]
    notes += [f"Rank {rank} is slow: {reason}" for rank, reason in run["slow"]]
    return notes + [f"Rank {rank} is starved: {reason}" for rank, reason in run["starved"]]


def _tiles(run: Mapping[str, Any]) -> str:
    steps = [rank["step"] for rank in run["ranks"] if rank["step"] is not None]
    protected = [rank["protected"] for rank in run["ranks"]]
    tiles = []
    if steps:
        ages = [rank["told_s_ago"] for rank in run["ranks"] if rank["told_s_ago"] is not None]
        tiles.append(("step", str(min(steps)), f"committed {min(ages):.0f} s ago" if ages else ""))
        whole = bool(protected) and None not in protected
        behind = f"{min(steps) - min(protected)} behind" if whole else "no copies on two nodes yet"
        tiles.append(("protected step", str(min(protected)) if whole else "none", behind))
    now, all_of_it = (run["goodput"][window]["ratio"] for window in ("now", "run"))
    tiles.append(("goodput now", f"{100 * now:.0f} %", f"{100 * all_of_it:.1f} % of the run"))
    lost = sum(incident["steps_lost"] for incident in run["incidents"])
    tiles.append(("failures", str(run["num_incidents"]), f"{lost} committed step{'s' * (lost != 1)} lost"))
    spares = _spares(run)
    tiles.append(("spare nodes", str(len(spares)), ", ".join(spares[:4])))
    if run["fetch_p95_s"] is not None:
        tiles.append(("wait for a batch", f"{1000 * run['fetch_p95_s']:.0f} ms", "95 of 100 take less"))
    skew = run["skew"]
    if skew is not None:
        times = skew["slowest_s"] / skew["fastest_s"] if skew["fastest_s"] else 1.0
        note = f"rank {skew['slowest']} works {skew['slowest_s']:.2f} s a step, "
        note += f"rank {skew['fastest']} {skew['fastest_s']:.2f} s"
        tiles.append(("rank skew", f"{times:.1f} ×", note))
    if run["on_disk"] is not None:
        tiles.append(("step on disk", str(run["on_disk"]["step"]), f"for {run['on_disk']['s_ago']:.0f} s"))
    drawn = "".join(
        f'<div class="card"><span class="label">{escape(title)}</span><div class="value">{escape(value)}</div>'
        f'<span class="small">{escape(note)}</span></div>'
        for title, value, note in tiles
    )
    return f'<div class="tiles">{drawn}</div>'


def _nodes(run: Mapping[str, Any], asked: str, token: str) -> str:
    order = {"training": 0, "spare": 1, "witness": 2}
    nodes = sorted(run["nodes"], key=lambda node: (order.get(node["part"], 3), node["name"]))
    return "".join(_node(node, run, asked, token) for node in nodes)


def _node(node: Mapping[str, Any], run: Mapping[str, Any], asked: str, token: str) -> str:
    name = escape(node["name"])
    if node["name"] != asked and (node["page"] or "").startswith(("http://", "https://")):
        address = node["page"] + (f"?token={quote(token)}" if token else "")
        name = f'<a class="node" href="{escape(address, quote=True)}">{name}</a>'
    here = ' <span class="small">(this page)</span>' if node["name"] == asked else ""
    state = node["state"] if node["answered"] or node["part"] == "witness" else f"{node['state']}, did not answer"
    ranks = [rank for rank in run["ranks"] if rank["node"] == node["name"]]
    domain = _domain(each["name"] for each in run["nodes"] if each["part"] != "witness")
    memory = []
    if node["vault_bytes"]:
        memory.append(f"{size_text(node['vault_bytes'])} of copies")
    if node["num_warm"] is not None:
        memory.append(f"{node['num_warm']} warm processes")
    if node["state"] not in ("alive", "suspect"):
        told = f'<span>{escape(node["state"])}</span></div><p class="small">{escape(node["reason"])}</p>'
        return f'<div class="card lost"><div class="head"><h3>{name}{here}</h3>{told}</div>'
    return (
        f'<div class="card"><div class="head"><h3>{name}{here}</h3><span>{escape(node["part"])}, '
        f"{escape(state)}</span></div>{_ranks(ranks, domain) if ranks else ''}"
        f"<p><b>If it dies now:</b> {escape(node['if_it_dies'])}</p>"
        f'<p class="small">{escape(", ".join(memory))}</p></div>'
    )


def _domain(names: Iterable[str]) -> str:
    """What all host names end with, from a dot on."""
    ends = {name.partition(".")[1] + name.partition(".")[2] for name in names}
    return ends.pop() if len(ends) == 1 else ""


def _ranks(ranks: Any, domain: str) -> str:
    rows = []
    for rank in ranks:
        step = "" if rank["step"] is None else str(rank["step"])
        protected = "nothing yet" if rank["protected"] is None else f"step {rank['protected']}"
        copies = ", ".join(rank["keepers"])
        short = ", ".join(name.removesuffix(domain) for name in rank["keepers"])
        cells = (str(rank["rank"]), DOING.get(rank["phase"], rank["phase"]), step, protected)
        named = f'<td class="copies" title="{escape(copies, quote=True)}">{escape(short)}</td>'
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + named + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in ("rank", "state", "step", "protected", "copy on"))
    return f'<table class="ranks"><tr>{head}</tr>{"".join(rows)}</table>'


def _failure(incident: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    """What died, why, what it cost, whether the run is protected again."""
    ranks = ", ".join(map(str, incident["replaced"]))
    what = WHAT_DIED[incident["cause"]] + (f": rank{'s' * (len(incident['replaced']) > 1)} {ranks}" if ranks else "")
    over = incident["seconds"] is not None
    cost = f"{incident['seconds']:.1f} s without a new step" if over else "not over yet"
    lost = incident["steps_lost"]
    cost += f", {lost if lost else 'no'} committed step{'s' * (lost != 1)} lost"
    facts = (
        ("What died", f"{escape(what)}, {incident['s_ago']:.0f}&nbsp;s&nbsp;ago"),
        ("Why", escape(incident["reason"])),
        ("What it cost", escape(cost)),
        ("Protected again?", _protected_again(incident, run)),
    )
    described = "".join(f"<div><dt>{title}</dt><dd>{value}</dd></div>" for title, value in facts)
    return f'<div class="card"><dl class="facts">{described}</dl>{_phases(incident["phases"])}{_origin(incident)}</div>'


def _origin(incident: Mapping[str, Any]) -> str:
    if incident["source"] == "none":
        return ""
    sources = " and ".join(SOURCES.get(each, each) for each in incident["source"].split(", "))
    return f'<p class="small">The state came from {escape(sources)}; {incident["bytes"] / 1e6:.1f} MB were sent.</p>'


def _protected_again(incident: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    if incident["protected_s"] is not None:
        return f'<span class="yes">✓ yes</span>, {incident["protected_s"]:.1f} s after it'
    if incident is not run["incidents"][0]:
        return "not before the next failure"
    if run["verdict"] is not None:
        return "the run ended before"
    return '<span class="no">! not yet</span>: new copies are on their way'


def _phases(phases: Mapping[str, float]) -> str:
    shown = {name: seconds for name, seconds in phases.items() if seconds >= LEAST_SHOWN_S}
    drawn = [
        (escape(PHASES.get(name, name)), PHASE_COLOURS.get(name, COLOURS["other"]), seconds)
        for name, seconds in shown.items()
    ]
    legend = "".join(
        f"<span>{_swatch(colour)}{escape(title)} {seconds:.2f} s</span>" for title, colour, seconds in drawn
    )
    return f'{_bar([(title, colour, seconds) for title, colour, seconds in drawn])}<div class="legend">{legend}</div>'


def _bar(parts: list[tuple[str, str, float]]) -> str:
    total = sum(amount for _, _, amount in parts)
    drawn = "".join(
        f'<i style="width:{100 * amount / total:.2f}%;background:{colour}" title="{title}: {amount:.2f} s"></i>'
        for title, colour, amount in parts
        if total > 0
    )
    return f'<div class="bar">{drawn}</div>'


def _swatch(colour: str) -> str:
    return f'<span class="swatch" style="background:{colour}"></span>'


def _goodput(run: Mapping[str, Any]) -> str:
    found = {window: Goodput(run["goodput"][window]["seconds"]) for window in WINDOWS}
    bars = "".join(
        f'<div class="head"><span>{title}</span><b>{100 * found[window].ratio:.1f} % useful</b></div>'
        + _bar([(CATEGORIES[name], COLOURS[name], part) for name, part in found[window].by_category().items()])
        for window, title in WINDOWS.items()
    )
    rows = []
    for category, title in CATEGORIES.items():
        shares = [each.by_category().get(category, 0.0) / (each.wall_s or 1.0) for each in found.values()]
        if any(shares):
            cells = "".join(f'<td class="number">{100 * share:.1f} %</td>' for share in shares)
            rows.append(f"<tr><td>{_swatch(COLOURS[category])}{title}</td>{cells}</tr>")
    head = "".join(f'<th class="number">{title.split()[-1]}</th>' for title in WINDOWS.values())
    return f'<div class="card">{bars}<table><tr><th></th>{head}</tr>{"".join(rows)}</table></div>'
