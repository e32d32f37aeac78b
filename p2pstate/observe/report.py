"""A run as one HTML page that needs nothing else: no network, no script.

In: a `History`. Out: HTML. What a run has written about itself is escaped.
Known limits: of more than ``MAX_RANKS`` ranks the timeline shows the first; see skew.py for very long runs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from html import escape

from p2pstate.observe import svg
from p2pstate.observe.goodput import CATEGORIES
from p2pstate.observe.history import History
from p2pstate.observe.incidents import PHASES
from p2pstate.observe.skew import MAX_FINDINGS
from p2pstate.observe.timeline import MAX_RANKS, NUM_CELLS

__all__ = ["as_html"]

MAX_UNBROKEN = 14  # characters

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1000px; padding: 0 1em; color: #222; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; } td, th { padding: .2em .9em .2em 0; text-align: left; vertical-align: top; }
th { font-weight: 600; } td.number { text-align: right; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; } td.short { white-space: nowrap; }
svg { width: 100%; min-width: 40em; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: currentColor; }
svg polyline { fill: none; stroke-width: 1.5; } svg .axis { stroke: #999; }
svg .mark { stroke: #000; stroke-width: 1.5; }
.legend span { margin-right: 1.2em; white-space: nowrap; } .legend i { display: inline-block; width: .9em; height: .9em;
margin-right: .4em; vertical-align: -.1em; border: 1px solid #555; }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd; } svg .mark { stroke: #fff; } }
"""


def as_html(history: History, title: str) -> str:
    sections = [
        ("Summary", _summary(history)),
        ("Where the time went", _waterfall(history)),
        ("Failures", _incidents(history)),
        ("Every rank over time", _timeline(history)),
        ("Steps", _steps(history)),
        ("Rank skew", _skew(history)),
        ("Configuration and environment", _starts(history)),
    ]
    body = "".join(f"<h2>{escape(name)}</h2>{content}" for name, content in sections)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    body = f"<body><h1>{escape(title)}</h1>{body}</body>"
    return f'<!doctype html><html lang="en"><head>{head}<style>{STYLE}</style></head>{body}</html>'


def _summary(history: History) -> str:
    total, mtbf_s = history.total, history.rank_mtbf_s
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(history.begin))
    rows = [
        ("goodput", f"{100 * total.ratio:.1f} % of {total.wall_s:.1f} s of all {len(history.ranks)} ranks"),
        ("began", f"{began}, lasted {history.end - history.begin:.1f} s"),
        ("newest step", str(history.newest_step)),
        ("started", f"{history.num_starts} times" if history.num_starts > 1 else "once"),
        ("failures", f"{history.num_failures}, {history.steps_lost} committed steps lost"),
        ("ended", str(history.verdict["text"]) if history.verdict is not None else "no verdict in these files"),
    ]
    if mtbf_s is not None:
        rows.insert(5, ("time between failures", f"{mtbf_s:.1f} s of a rank's time"))
    return _table((), rows)


def _waterfall(history: History) -> str:
    total = history.total
    if total.wall_s <= 0:
        return "<p>Nothing was measured.</p>"
    sums = total.by_category()
    order = [category for category in CATEGORIES if category != "useful" and category in sums] + ["useful"]
    shares = {category: (CATEGORIES[category], sums.get(category, 0.0)) for category in order}
    rows = [
        (
            CATEGORIES[category],
            f"{seconds:.2f}",
            f"{100 * seconds / total.wall_s:.2f} %",
            _parts(total.phases(category)),
        )
        for category, seconds in sums.items()
    ]
    return _scroll(svg.waterfall(shares, total.wall_s, "s")) + _table(("category", "seconds", "part", "of which"), rows)


def _parts(phases: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items())


def _incidents(history: History) -> str:
    if not history.incidents:
        return "<p>None.</p>"
    rows, drawn = [], []
    for number, incident in enumerate(history.incidents, start=1):
        took = "not over" if incident.seconds is None else f"{incident.seconds:.2f} s"
        size = f"{incident.num_bytes / 1e6:.1f} MB"
        after = f"{incident.t - history.begin:.1f} s"
        replaced = ", ".join(map(str, sorted(incident.replaced))) or "none"
        rows.append(
            (
                str(number),
                after,
                incident.cause,
                incident.reason,
                replaced,
                incident.source,
                size,
                str(incident.steps_lost),
                took,
                "no" if incident.protected_s is None else f"after {incident.protected_s:.2f} s",
            )
        )
        phases = {PHASES.get(name, name): seconds for name, seconds in incident.phases().items()}
        drawn.append((f"{number}: {incident.cause}", phases, took))
    largest = max((sum(phases.values()) for _, phases, _ in drawn), default=0.0)
    head = ("", "after", "what", "why", "ranks replaced", "state from", "sent", "steps lost", "took", "protected again")
    colours = {PHASES.get(name, name): colour for name, colour in svg.PHASE_COLOURS.items()}
    of_other_releases = {name: svg.COLOURS["other"] for _, phases, _ in drawn for name in phases if name not in colours}
    colours |= of_other_releases
    return _table(head, rows) + _scroll(svg.bars(drawn, largest, colours))


def _timeline(history: History) -> str:
    begin, length = history.begin, max(1e-9, history.end - history.begin)
    rows = [(f"rank {rank}", cells) for rank, cells in sorted(history.timeline.ranks.items())]
    marks = [((each.t - begin) / length, f"{each.cause}: {each.reason}") for each in history.incidents]
    left_out = f"<p>The first {MAX_RANKS} of {len(history.ranks)} ranks.</p>" if len(history.ranks) > MAX_RANKS else ""
    colours = {CATEGORIES[category]: colour for category, colour in svg.COLOURS.items()}
    return _scroll(svg.strips(rows, marks, _seconds(length))) + svg.legend(colours) + left_out


def _steps(history: History) -> str:
    """Over time, in cells: how long steps took, how long batches were waited for, how far protection was behind."""
    if not history.timeline.steps:
        return "<p>No step was committed.</p>"
    cells = [((number + 0.5) / NUM_CELLS, cell) for number, cell in sorted(history.timeline.steps.items())]
    times = {
        "longest useful step": [(x, cell.useful_s) for x, cell in cells],
        "longest wait for a batch": [(x, cell.fetch_s) for x, cell in cells],
    }
    what = "steps that are committed and not yet protected, at most"
    lag = {what: [(x, float(cell.lag_steps)) for x, cell in cells]}
    ticks = _seconds(max(1e-9, history.end - history.begin))
    return _scroll(svg.lines(times, "s", ticks)) + _scroll(svg.lines(lag, "steps", ticks, height=90))


def _skew(history: History) -> str:
    """Over the run's steps: what a step takes the slowest and the fastest rank without waiting for others."""
    skews = history.skews
    if not skews.points:
        return "<p>Not measured: it takes two ranks.</p>"
    last = skews.points[-1][0]
    series = {
        "slowest rank": [(step / last, slowest_s) for step, slowest_s, _ in skews.points],
        "fastest rank": [(step / last, fastest_s) for step, _, fastest_s in skews.points],
    }
    text = "<p>A step's own work of the slowest and of the fastest rank, by step; the others wait for the slowest.</p>"
    rows = skews.findings
    found = _table(("steps", "who", "why"), rows) if rows else "<p>No rank straggled or was starved.</p>"
    left_out = f"<p>The first {MAX_FINDINGS} of {skews.num_findings}.</p>" if skews.num_findings > len(rows) else ""
    ticks = [f"step {skews.first_step}", f"step {last}"]
    return text + _scroll(svg.lines(series, "s", ticks)) + found + left_out


def _starts(history: History) -> str:
    if not history.starts:
        return "<p>Not recorded.</p>"
    nodes = sorted(history.starts)
    rows = []
    for group in ("configuration", "environment"):
        names = dict.fromkeys(name for node in nodes for name in history.starts[node].get(group, {}))
        for name in names:
            values = {node: str(history.starts[node].get(group, {}).get(name, "")) for node in nodes}
            same = len(set(values.values())) == 1
            text = values[nodes[0]] if same else "; ".join(f"{node}: {value}" for node, value in values.items())
            rows.append((name, text))
    return f"<p>{len(nodes)} nodes: {escape(', '.join(nodes))}</p>" + _table((), rows)


def _seconds(length: float) -> list[str]:
    """What stands below a picture of the whole run."""
    return [f"{length * quarter / 4:.0f} s" for quarter in range(5)]


def _scroll(content: str) -> str:
    return f'<div class="scroll">{content}</div>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>" if head else ""
    lines = "".join("<tr>" + "".join(_cell(cell) for cell in row) + "</tr>" for row in rows)
    return _scroll(f"<table>{top}{lines}</table>")


def _cell(text: str) -> str:
    """What is short stays in one line."""
    kind = ' class="short"' if len(text) <= MAX_UNBROKEN else ""
    return f"<td{kind}>{escape(text)}</td>"
