"""The form of an image, the bytes of one part of one version: data, tail, footer.

In: a layout, names, plain values, the version and part. Out: the tail that is written behind the data; and from the
bytes of an image its leaves, its values, and whether it is of the version and part it is taken for.

Invariant: what an image is of lies under its digest, so a copy in another one's place is told from the right one.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import torch

from p2pstate.slots import part_name
from p2pstate.state import Layout, Leaf
from p2pstate.state.chunks import chunks_of
from p2pstate.state.decoding import unsqueezed
from p2pstate.types import Part, Version

__all__ = ["is_image_of", "open_image", "read_image", "tail_begin", "tail_end"]

_FOOTER = struct.Struct("<qq16sQ")  # epoch, step, name of the part, where the tail begins


def tail_begin(layout: Layout, leaves: Sequence[Leaf], tied: Mapping[str, str]) -> bytes:
    """Names and shapes say much the same again and again: they are squeezed, once for many versions."""
    here = {leaf.name for leaf in leaves}
    names = {further: name for further, name in tied.items() if name in here}
    told = {"table": layout.table(), "chunks": chunks_of(leaves), "tied": names}
    packer = msgpack.Packer(use_bin_type=True)
    return b"".join(
        [
            packer.pack_map_header(2),
            packer.pack("told"),
            packer.pack(zlib.compress(packer.pack(told), 1)),
            packer.pack("values"),
        ]
    )


def tail_end(values: bytes, version: Version, part: Part, data_bytes: int) -> bytes:
    """What is written behind :func:`tail_begin`: the plain values, and of what the image is."""
    packed: bytes = msgpack.packb(values, use_bin_type=True)
    return packed + _FOOTER.pack(*version, part_name(part), data_bytes)


def read_image(body: torch.Tensor) -> tuple[dict[str, torch.Tensor], bytes]:
    """The leaves (views into ``body``) and the plain values of one image; see :func:`open_image`."""
    layout, tail = open_image(body)
    return layout.read(body[: layout.num_bytes]), tail["values"]


def is_image_of(body: torch.Tensor, version: Version, part: Part) -> bool:
    """Whether these bytes were captured as this part of this version; see :func:`open_image`."""
    epoch, step, name, _ = _footer(body)
    return (epoch, step, name) == (*version, part_name(part))


def _footer(body: torch.Tensor) -> tuple[int, int, bytes, int]:
    if body.numel() < _FOOTER.size:
        raise ValueError(f"not an image: {body.numel()} bytes")
    return _FOOTER.unpack(bytes(body[body.numel() - _FOOTER.size :].numpy()))


def open_image(body: torch.Tensor) -> tuple[Layout, dict[str, Any]]:
    """Where the leaves lie in ``body``, and what else an image says.

    That is: ``chunks`` (see state/chunks.py), ``tied`` (further names of leaves), ``values``.

    ``body``: 1-D uint8, exactly the bytes of one image: data, tail, and a footer that says where the tail begins.
    Raises ValueError when it is not an image.
    """
    num_bytes = body.numel()
    *_, data_bytes = _footer(body)
    if not 0 <= data_bytes <= num_bytes - _FOOTER.size:
        raise ValueError(f"not an image: its tail would begin at {data_bytes} of {num_bytes} bytes")
    raw = bytes(body[data_bytes : num_bytes - _FOOTER.size].numpy())
    tail = msgpack.unpackb(raw, raw=False, strict_map_key=False)
    told = msgpack.unpackb(unsqueezed(tail["told"]), raw=False, strict_map_key=False)
    return Layout.from_table(told.pop("table")), {**told, "values": tail["values"]}
