"""Whether the lengths that MessagePack bytes claim fit into them.

In: bytes of unknown origin. Out: nothing, or ValueError.
"""

from __future__ import annotations

__all__ = ["check_lengths"]

# first byte -> (bytes of the length field, bytes per unit of length, fixed bytes, elements per unit of length)
_HEADS: dict[int, tuple[int, int, int, int]] = {
    **{0xC4 + i: (1 << i, 1, 0, 0) for i in range(3)},  # bin
    **{0xC7 + i: (1 << i, 1, 1, 0) for i in range(3)},  # ext
    0xCA: (0, 0, 4, 0),
    0xCB: (0, 0, 8, 0),
    **{0xCC + i: (0, 0, 1 << i, 0) for i in range(4)},  # uint
    **{0xD0 + i: (0, 0, 1 << i, 0) for i in range(4)},  # int
    **{0xD4 + i: (0, 0, (1 << i) + 1, 0) for i in range(5)},  # fixext
    **{0xD9 + i: (1 << i, 1, 0, 0) for i in range(3)},  # str
    **{0xDC + i: (2 << i, 0, 0, 1) for i in range(2)},  # array
    **{0xDE + i: (2 << i, 0, 0, 2) for i in range(2)},  # map
}


_EXTENSION_HEADS = frozenset([*range(0xC7, 0xCA), *range(0xD4, 0xD9)])


def check_lengths(data: bytes) -> None:
    """ValueError unless ``data`` is exactly one MessagePack object whose every length fits into it.

    The C decoder allocates what an array header claims before it has seen the elements, at every level of nesting;
    after this check the elements of all headers together are at most ``len(data)``.
    """
    at, owed, end = 0, 1, len(data)
    while owed:
        if owed > end - at:
            raise ValueError("truncated, or a length larger than the data")
        head = data[at]
        at += 1
        owed -= 1
        if head <= 0x7F or head >= 0xE0 or head in (0xC0, 0xC2, 0xC3):
            continue
        if head <= 0x8F:
            owed += 2 * (head & 0x0F)
        elif head <= 0x9F:
            owed += head & 0x0F
        elif head <= 0xBF:
            at += head & 0x1F
        elif head in _HEADS:
            num_length_bytes, per_unit, fixed, elements = _HEADS[head]
            length = int.from_bytes(data[at : at + num_length_bytes], "big")
            if head in _EXTENSION_HEADS and data[at + num_length_bytes : at + num_length_bytes + 1] == b"\xff":
                raise ValueError("a timestamp is not allowed")
            at += num_length_bytes + per_unit * length + fixed
            owed += elements * length
        else:
            raise ValueError(f"byte {head:#x} starts no value")
    if at != end:
        raise ValueError("truncated" if at > end else "data after the value")
