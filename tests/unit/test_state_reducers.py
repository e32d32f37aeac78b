"""A forward of DistributedDataParallel without a backward so far is state: DDP reduces in the next backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from state_zoo import image_of, restore
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from p2pstate.state import TrainingState
from p2pstate.state.reducers import awaited_backward

pytestmark = pytest.mark.usefixtures("gloo")


class Critic:
    """Of a GAN; ``num_reduced`` of its backwards so far."""

    def __init__(self, net: nn.Module | None = None, **options: Any) -> None:
        self.num_reduced = 0
        self.net = DistributedDataParallel(net or nn.Linear(4, 1), **options)

        def count(_: Any, bucket):  # type: ignore[no-untyped-def]  # torch looks at annotations
            self.num_reduced += 1
            future: torch.futures.Future[Any] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        self.net.register_comm_hook(None, count)
        self.state = TrainingState([self.net], [torch.optim.SGD(self.net.parameters(), 0.1)], {})

    def backward(self) -> None:
        self.net(torch.ones(2, 4)).sum().backward()

    def is_reduced_without_sync(self) -> bool:
        before = self.num_reduced
        with self.net.no_sync():
            self.backward()
        return self.num_reduced > before

    def judge_frozen(self) -> None:
        """For the generator's loss: a forward, and a backward that leaves this one alone."""
        fake = torch.ones(2, 4, requires_grad=True)
        self.net.requires_grad_(False)
        self.net(fake).sum().backward()
        self.net.requires_grad_(True)


def test_forward_without_a_backward_is_restored_in_survivors_and_newcomers() -> None:
    survivor, newcomer = Critic(), Critic()
    for critic in (survivor, newcomer):
        critic.backward()
        critic.backward()  # lays buckets out anew
    survivor.judge_frozen()
    image = image_of(survivor.state)
    assert survivor.is_reduced_without_sync()
    assert not survivor.is_reduced_without_sync()  # from here on it is another state
    for critic in (survivor, newcomer):
        restore(critic.state, image)
        assert critic.is_reduced_without_sync()


def test_model_that_lays_its_buckets_out_in_its_next_forward_can_still_do_so() -> None:
    survivor, newcomer = Critic(), Critic()
    survivor.backward()
    survivor.judge_frozen()
    newcomer.backward()
    restore(newcomer.state, image_of(survivor.state))
    newcomer.backward()


def test_forward_with_a_backward_leaves_nothing_to_restore() -> None:
    survivor, newcomer = Critic(), Critic()
    survivor.backward()
    image = image_of(survivor.state)
    for critic in (survivor, newcomer):
        restore(critic.state, image)
        assert not critic.is_reduced_without_sync()


class Partly(nn.Module):
    """Its first parameters are in no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.used = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.used(inputs)


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_backward_that_leaves_parameters_out_is_one(option: str) -> None:
    critic = Critic(Partly(), **{option: True})
    image_of(critic.state)
    critic.backward()
    assert not awaited_backward(critic.net).awaited
