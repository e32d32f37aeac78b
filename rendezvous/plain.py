"""Plain values: what MessagePack carries, read with suspicion.

Flows in: untrusted values. Flows out: the same values, or ValueError naming what was expected.
Invariants: a reader returns exactly the type it names; sizes are bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

MAX_NAME_CHARS = 256
MAX_TEXT_CHARS = 4096
MAX_MEMBERS = 4096
# Of a number to which its receiver adds one, so that what no run ever reaches is refused and never passed on.
MAX_COUNTER = 2**48

T = TypeVar("T")


def text_from(value: object, what: str, limit: int = MAX_TEXT_CHARS) -> str:
    """`value` if it is a string of at most `limit` characters, else ValueError."""
    if not isinstance(value, str) or len(value) > limit:
        raise ValueError(f"{what} must be a string of at most {limit} characters")
    return value


def bytes_from(value: object, what: str, limit: int) -> bytes:
    """`value` if it is at most `limit` bytes, else ValueError."""
    if not isinstance(value, bytes) or len(value) > limit:
        raise ValueError(f"{what} must be at most {limit} bytes")
    return value


def count_from(value: object, what: str, limit: int = 2**63 - 1) -> int:
    """`value` if it is an integer in 0..limit, else ValueError."""
    if type(value) is not int or not 0 <= value <= limit:
        raise ValueError(f"{what} must be an integer between 0 and {limit}")
    return value


def counter_from(value: object, what: str) -> int:
    """`value` if it is a number that counts up, event by event, and can go on doing so, else ValueError."""
    return count_from(value, what, MAX_COUNTER)


def list_from(value: object, what: str, num_items: int | None = None, limit: int = MAX_MEMBERS) -> list[Any]:
    """`value` if it is a list (of exactly `num_items` items where given), else ValueError."""
    if not isinstance(value, list) or len(value) > limit or (num_items is not None and len(value) != num_items):
        raise ValueError(f"{what} must be a list of {num_items if num_items is not None else f'at most {limit}'} items")
    return value


def table_from(value: object, what: str) -> dict[str, Any]:
    """`value` if it is a dict with string keys, else ValueError."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{what} must be a table with string keys")
    return value


def flag_from(value: object) -> bool:
    """`value` if it is a bool, else ValueError."""
    if not isinstance(value, bool):
        raise ValueError("a flag must be a bool")
    return value


def seconds_from(value: object) -> float:
    """`value` as a float if it is a number of seconds that can be, else ValueError."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1e9:
        raise ValueError("a duration must be a number of seconds")
    return float(value)


def optional(reader: Callable[[object], T]) -> Callable[[object], T | None]:
    """A reader that lets None pass."""
    return lambda value: None if value is None else reader(value)


def to_plain(value: Any) -> Any:
    """The plain form of a value that has one; tuples become lists."""
    if hasattr(value, "to_plain"):
        return value.to_plain()
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    return value
