"""Values of the standard library's own types that a line of text says exactly: times, paths, decimal numbers.

In: such a value. Out: the name of its kind and its text, and back.
Invariant: what would not come back the same (a time in a named zone) is not taken.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import PosixPath, PurePosixPath
from typing import Any
from uuid import UUID

__all__ = ["from_text", "to_text"]


def _duration(text: str) -> timedelta:
    days, seconds, microseconds = map(int, text.split())
    return timedelta(days, seconds, microseconds)


_KINDS: dict[type, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    datetime: (datetime.isoformat, datetime.fromisoformat),
    date: (date.isoformat, date.fromisoformat),
    time: (time.isoformat, time.fromisoformat),
    timedelta: (lambda value: f"{value.days} {value.seconds} {value.microseconds}", _duration),
    Decimal: (str, Decimal),
    PosixPath: (str, PosixPath),
    PurePosixPath: (str, PurePosixPath),
    UUID: (str, UUID),
}
_READERS = {kind.__name__: read for kind, (_, read) in _KINDS.items()}


def to_text(value: Any) -> tuple[str, str] | None:
    """(kind, text) for :func:`from_text`; None for values of other types, and those that text does not say exactly."""
    kind = _KINDS.get(type(value))
    if kind is None:
        return None
    write, read = kind
    text = write(value)
    return (type(value).__name__, text) if repr(read(text)) == repr(value) else None


def from_text(kind: str, text: str) -> Any:
    """ValueError or ArithmeticError for what :func:`to_text` does not give."""
    if kind not in _READERS:
        raise ValueError(f"unknown kind of value {kind!r}")
    return _READERS[kind](text)
