"""Data that restarts where it stopped. Usable without the rest of p2pstate, in any PyTorch program.

In: data sets, token files. Out: batches in an order that is a function of (seed, epoch, position),
with positions that can be saved, restored and taken up by another number of ranks; windows of tokens.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p2pstate.data.cache import CachedFiles
    from p2pstate.data.files import DataChanged
    from p2pstate.data.loader import Loader
    from p2pstate.data.order import Mixture, Shuffled
    from p2pstate.data.pool import LoaderError
    from p2pstate.data.sampler import Sampler
    from p2pstate.data.tokens import MmapTokens

__all__ = ["CachedFiles", "DataChanged", "Loader", "LoaderError", "Mixture", "MmapTokens", "Sampler", "Shuffled"]

_MODULES = {
    "CachedFiles": "cache",
    "DataChanged": "files",
    "Loader": "loader",
    "LoaderError": "pool",
    "Mixture": "order",
    "MmapTokens": "tokens",
    "Sampler": "sampler",
    "Shuffled": "order",
}


def __getattr__(name: str) -> Any:
    # the commands (p2pstate data pack) and the agents that share them need no torch
    if name in _MODULES:
        return getattr(importlib.import_module(f"p2pstate.data.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'p2pstate.data' has no attribute {name!r}")
