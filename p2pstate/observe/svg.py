"""Small pictures as SVG text, for pages that need nothing from elsewhere.

In: numbers and names. Out: ``<svg>`` elements. Colours are told apart without colour vision too (Okabe and Ito), and
every mark has a title that says what it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

__all__ = ["COLOURS", "PHASE_COLOURS", "bars", "lines", "strips", "waterfall"]

WIDTH = 960
LABEL_WIDTH = 200
ROW_HEIGHT = 22
TICK_HEIGHT = 18
COLOURS = {
    "useful": "#009e73",
    "data": "#f0e442",
    "protection": "#56b4e9",
    "saving": "#0072b2",
    "repeated": "#e69f00",
    "recovery": "#d55e00",
    "waiting": "#cc79a7",
    "startup": "#999999",
    "phase": "#8c6bb1",
    "shutdown": "#bbbbbb",
    "other": "#666666",
}
PHASE_COLOURS = {  # of a recovery
    "detect": COLOURS["recovery"],
    "abort": COLOURS["repeated"],
    "quiesce": COLOURS["startup"],
    "view": COLOURS["saving"],
    "spare": COLOURS["waiting"],
    "groups": COLOURS["protection"],
    "verify": COLOURS["phase"],
    "pull": COLOURS["useful"],
    "restore": COLOURS["data"],
    "first step": COLOURS["other"],
}
SHADES = (
    *("#d55e00", "#e69f00", "#56b4e9", "#0072b2", "#cc79a7", "#999999"),
    *("#f0e442", "#009e73", "#8c6bb1", "#444444", "#66c2a5", "#bbbbbb"),
)


def waterfall(shares: Mapping[str, tuple[str, float]], total: float, unit: str) -> str:
    """From everything down to what was useful: ``shares`` is category -> (title, amount), the useful one last."""
    rows, left = [], total
    for category, (title, amount) in shares.items():
        begin = left - amount
        share = f"{100 * amount / total:.1f} %"
        rows.append(
            (title, [(max(0.0, begin), amount, COLOURS[category], f"{title}: {amount:.2f} {unit}, {share}")], share)
        )
        left = begin
    return _rows(rows, total)


def bars(rows: Sequence[tuple[str, Mapping[str, float], str]], largest: float, colours: Mapping[str, str]) -> str:
    """A bar per row, of segments one after the other: (title, segment -> amount, what stands behind the bar)."""
    names = [name for name in colours if any(name in segments for _, segments, _ in rows)]
    drawn = []
    for title, segments, note in rows:
        begin, marks = 0.0, []
        for name, amount in segments.items():
            marks.append((begin, amount, colours[name], f"{name}: {amount:.3f} s"))
            begin += amount
        drawn.append((title, marks, note))
    return _rows(drawn, largest) + legend({name: colours[name] for name in names})


def strips(
    rows: Sequence[tuple[str, Sequence[Mapping[str, float]]]],
    marks: Sequence[tuple[float, str]],
    ticks: Sequence[str] = (),
) -> str:
    """Time from left to right, a strip per row: in each of its cells the shares of the categories, from the bottom up.

    ``marks``: (where, from 0 to 1; what) drawn across all rows; ``ticks``: what stands below, from left to right.
    """
    width = WIDTH - LABEL_WIDTH
    height = ROW_HEIGHT * len(rows)
    parts = []
    for number, (title, cells) in enumerate(rows):
        top = ROW_HEIGHT * number
        parts.append(_text(LABEL_WIDTH - 8, top + 15, title, "end"))
        cell_width = width / max(1, len(cells))
        for column, shares in enumerate(cells):
            bottom = top + ROW_HEIGHT - 3.0
            full = max(1.0, sum(shares.values()))  # what was reported late can lie on top of something else
            for category in COLOURS:
                share = shares.get(category, 0.0) / full
                if share <= 0.005:
                    continue
                bar = (ROW_HEIGHT - 5) * share
                bottom -= bar
                what = f"{title}: {category} {100 * share:.0f} %"
                parts.append(
                    _rect(LABEL_WIDTH + column * cell_width, bottom, cell_width + 0.2, bar, COLOURS[category], what)
                )
    for where, what in marks:
        x = LABEL_WIDTH + width * where
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}" class="mark"><title>{escape(what)}</title></line>'
        )
    return _svg(height + TICK_HEIGHT, parts + _ticks(ticks, height))


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]], unit: str, ticks: Sequence[str] = (), height: int = 140
) -> str:
    """Points (x from 0 to 1, y) of each series, joined; the axis begins at 0. ``ticks``: as in :func:`strips`."""
    top = max((y for points in series.values() for _, y in points), default=0.0) or 1.0
    width = WIDTH - LABEL_WIDTH - 10
    parts = [
        _text(LABEL_WIDTH - 8, 14, f"{top:.3g} {unit}", "end"),
        _text(LABEL_WIDTH - 8, height - 4, f"0 {unit}", "end"),
        f'<line x1="{LABEL_WIDTH}" x2="{WIDTH}" y1="{height - 6}" y2="{height - 6}" class="axis"/>',
    ]
    colours = {}
    for number, (name, points) in enumerate(series.items()):
        colours[name] = SHADES[(number * 3) % len(SHADES)]
        path = " ".join(
            f"{LABEL_WIDTH + width * x:.1f},{height - 6 - (height - 20) * y / top:.1f}"
            for x, y in points
            if math.isfinite(y)
        )
        parts.append(f'<polyline points="{path}" stroke="{colours[name]}"><title>{escape(name)}</title></polyline>')
    return _svg(height + TICK_HEIGHT, parts + _ticks(ticks, height)) + legend(colours)


def _ticks(texts: Sequence[str], top: float) -> list[str]:
    width, last = WIDTH - LABEL_WIDTH - 10, len(texts) - 1
    anchors = {0: "start", last: "end"}
    return [
        _text(LABEL_WIDTH + width * number / last, top + 13, text, anchors.get(number, "middle"))
        for number, text in enumerate(texts)
    ]


def legend(colours: Mapping[str, str]) -> str:
    items = "".join(
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in colours.items()
    )
    return f'<p class="legend">{items}</p>'


def _rows(rows: Sequence[tuple[str, Sequence[tuple[float, float, str, str]], str]], largest: float) -> str:
    """(title, marks of (begin, length, colour, what), what stands behind them)."""
    width = WIDTH - LABEL_WIDTH - 90
    scale = width / largest if largest > 0 else 0.0
    parts = []
    for number, (title, marks, note) in enumerate(rows):
        top = ROW_HEIGHT * number
        parts.append(_text(LABEL_WIDTH - 8, top + 15, title, "end"))
        end = 0.0
        for begin, length, colour, what in marks:
            bar = max(0.5, length * scale)
            parts.append(_rect(LABEL_WIDTH + begin * scale, top + 3, bar, ROW_HEIGHT - 6, colour, what))
            end = max(end, begin + length)
        parts.append(_text(LABEL_WIDTH + end * scale + 6, top + 15, note, "start"))
    return _svg(ROW_HEIGHT * len(rows), parts)


def _svg(height: float, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">{"".join(parts)}</svg>'


def _rect(x: float, y: float, width: float, height: float, colour: str, what: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}" fill="{colour}">'
        f"<title>{escape(what)}</title></rect>"
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
