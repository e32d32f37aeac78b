"""Durations, sizes and counts as people write them. Pure.

In: text as typed, or numbers. Out: seconds, bytes and counts, and text for people. Invariant: what these functions
write, they read. A month is 30 days, a year 365; sizes are powers of 1000 (KiB, MiB, GiB, TiB: of 1024).
"""

from __future__ import annotations

import math
import re

__all__ = ["DAY_S", "HOUR_S", "MONTH_S", "YEAR_S", "bytes_text", "duration_text", "parse_bytes", "parse_count"]
__all__ += ["parse_duration", "parse_price", "parse_share", "percent_text", "quantity_text"]

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
MONTH_S = 30 * DAY_S
YEAR_S = 365 * DAY_S

_NUMBER = r"\s*([+-]?[0-9.][0-9.,_]*(?:[eE][+-]?[0-9]+)?)\s*"
_THOUSANDS = r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?"
_TIMES_S = {"ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": HOUR_S, "d": DAY_S, "y": YEAR_S}
_COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_SIZES = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15}
_SIZES |= {name[0] + "iB": 1024.0**power for power, name in enumerate(("KB", "MB", "GB", "TB", "PB"), start=1)}


def parse_duration(text: str, unit: str) -> float:
    """Seconds of ``90s``, ``10min``, ``1.5h``, ``7d``, ``2y`` or ``20ms``; a bare number is in ``unit``."""
    value, suffix = _split(text, f"a duration, such as 90s, 10min, 1.5h or 7d (a number alone is in {_LONG[unit]})")
    scale = _TIMES_S.get(suffix or unit)
    if scale is None:
        raise ValueError(f"{text!r} is no duration: the units are {', '.join(_TIMES_S)}")
    return value * scale


def parse_bytes(text: str) -> float:
    """Bytes of ``980GB``, ``1.2 TB`` or ``16GiB``; a bare number is in bytes."""
    value, suffix = _split(text, "a size, such as 980GB or 1.2TB")
    sizes = {name.lower(): scale for name, scale in _SIZES.items()}
    scale = sizes.get((suffix or "B").lower())
    if scale is None:
        raise ValueError(f"{text!r} is no size: the units are {', '.join(_SIZES)}")
    return value * scale


def parse_count(text: str) -> float:
    """A number such as ``70B``, ``8e9`` or ``70_000_000_000``."""
    value, suffix = _split(text, "a number, such as 70B or 8e9")
    scale = _COUNTS.get(suffix.upper())
    if scale is None:
        raise ValueError(f"{text!r} is no number: K, M, B and T may follow the digits")
    return value * scale


def parse_price(text: str) -> float:
    """Dollars, such as ``98.32``, ``$98.32`` or ``1,200``."""
    value, suffix = _split(text.strip().removeprefix("$"), "a price, such as 98.32")
    if suffix:
        raise ValueError(f"{text!r} is no price: give dollars, such as 98.32")
    return value


def parse_share(text: str) -> float:
    """A part of a whole: ``1%``, ``0.01``."""
    value, suffix = _split(text, "a part of a whole, such as 1% or 0.01")
    if suffix not in ("", "%"):
        raise ValueError(f"{text!r} is no part of a whole: write it like 1% or 0.01")
    return value / 100 if suffix else value


def _split(text: str, what: str) -> tuple[float, str]:
    match = re.fullmatch(_NUMBER + r"([A-Za-z%]*)\s*", text)
    if match is not None and "," in match.group(1) and not re.fullmatch(_THOUSANDS, match.group(1)):
        raise ValueError(f"{text!r} is ambiguous: a point goes before decimals, and commas between thousands only")
    try:
        value = float(match.group(1).replace(",", "").replace("_", "")) if match else math.nan
    except ValueError:
        value = math.nan
    if match is None or not math.isfinite(value):
        raise ValueError(f"{text!r} is not {what}")
    if value < 0:
        raise ValueError(f"{text!r} is negative: give {what}")
    return value, match.group(2)


_LONG = {"s": "seconds", "min": "minutes", "h": "hours", "d": "days", "y": "years"}


def duration_text(seconds: float) -> str:
    """Three significant digits in the unit that people use for so long a time."""
    for unit, scale, least in (("d", DAY_S, 7 * DAY_S), ("h", HOUR_S, HOUR_S), ("min", 60.0, 60.0), ("s", 1.0, 1.0)):
        if seconds >= least:
            return f"{_digits(seconds / scale)} {unit}"
    return f"{_digits(seconds * 1e3)} ms" if seconds else "0 s"


def bytes_text(num_bytes: float) -> str:
    for name, scale in reversed(list(_SIZES.items())[:6]):
        if num_bytes >= scale:
            return f"{_digits(num_bytes / scale)} {name}"
    return f"{num_bytes:.3g} B"


def quantity_text(num_bytes: float) -> str:
    """As Kubernetes writes memory, rounded up: ``66Gi``, below that ``700Mi``."""
    name, scale = ("Gi", _SIZES["GiB"]) if num_bytes >= _SIZES["GiB"] else ("Mi", _SIZES["MiB"])
    return f"{math.ceil(num_bytes / scale)}{name}"


def percent_text(share: float) -> str:
    """Of a part of a whole: two digits behind the point where it is small or nearly all, else one."""
    percent = 100 * share
    if 0 < percent < 1e-6:
        return "0 %"
    if 0 < percent < 0.01:
        return f"{percent:.6f}".rstrip("0") + " %"
    if 99.99 < percent < 100:
        return "> 99.99 %"
    return f"{percent:.2f} %" if percent < 1 or 99 < percent < 100 else f"{percent:.1f} %"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
