"""Shared by unit tests.

Hypothesis has no say in how fast examples are: on a machine that is busy each may take any time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")


@pytest.fixture
def gloo() -> Iterator[None]:
    """A default process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def closed_loaders(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No worker of a Loader outlives its test."""
    from p2pstate.data import Loader

    made: list[Loader] = []
    init = Loader.__init__

    def remember(self: Loader, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(Loader, "__init__", remember)
    yield
    for loader in made:
        loader.close()


@pytest.fixture(scope="session")
def unfaulted() -> list[Any]:
    """Three epochs of a Loader, read in the trainer's process."""
    from loader_data import Drawing, everything

    from p2pstate.data import Loader

    return everything(Loader(Drawing(), 4, shuffle=True, num_workers=0, seed=3), 3)
