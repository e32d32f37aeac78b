"""Which ranks hold which leaves, in a process that torch takes for one of many."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from p2pstate.state import TrainingState

Holders = dict[str, tuple[int, ...]]


@contextmanager
def rank_of(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def holders(*models: nn.Module, optimizers: Any = (), **objects: Any) -> Holders:
    state = TrainingState(models, optimizers, objects, rng=False)
    return {leaf.name: leaf.holders for leaf in state.collect().leaves}


def shared(found: Holders, with_ranks: tuple[int, ...]) -> set[str]:
    """Names held by these ranks; all others must be held by one rank only."""
    assert {len(ranks) for ranks in found.values()} <= {1, len(with_ranks)}
    return {name for name, ranks in found.items() if ranks == with_ranks}
