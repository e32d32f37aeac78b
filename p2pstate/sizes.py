"""Sizes in memory and on disk, as a person reads them. In: bytes. Out: text with a unit of 1024."""

from __future__ import annotations

__all__ = ["mib", "size_text"]


def size_text(num_bytes: int) -> str:
    """``4.7 KiB``, ``1.5 GiB``: for one size by itself."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} B"


def mib(num_bytes: int) -> str:
    """``4160 MiB``: for sizes that are compared within a sentence."""
    return f"{num_bytes / 2**20:.0f} MiB"
