"""What communication hooks remember is state: it comes back, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from state_zoo import assert_same, image_of, restore
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from p2pstate.state import LeafError, TrainingState

pytestmark = pytest.mark.usefixtures("gloo")


class Counting:
    """A hook's state of the user's own."""

    def __init__(self) -> None:
        self.calls = 0

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


def counted(state, bucket):  # type: ignore[no-untyped-def]  # torch looks at annotations, and cannot read text
    state.calls += 1
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(bucket.buffer() / state.calls)
    return future


def power(**options: Any) -> tuple[Any, Any]:
    return PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1, **options), powerSGD_hook


HOOKS = {
    "power": power,
    "power, batched": lambda: power(batch_tensors_with_same_shape=True),
    "power, no memory": lambda: power(use_error_feedback=False, warm_start=False),
    "local": lambda: (PostLocalSGDState(None, dist.group.WORLD, 3), post_localSGD_hook),
    "own": lambda: (Counting(), counted),
    "own, given as well": lambda: (Counting(), counted),
}


class Job:
    def __init__(self, name: str) -> None:
        torch.manual_seed(1)
        self.model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2)))
        self.hook, function = HOOKS[name]()
        self.model.register_comm_hook(self.hook, function)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        objects = {"mine": self.hook} if "given" in name else {}
        self.state = TrainingState([self.model], [self.optimizer], objects)

    def train(self, steps: range) -> None:
        for number in steps:
            self.model(torch.eye(6) * number).sin().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


@pytest.mark.parametrize("name", HOOKS)
def test_restore_of_what_a_hook_remembers_continues_like_its_twin(name: str) -> None:
    job = Job(name)
    job.train(range(5))
    image = image_of(job.state)
    job.train(range(5, 8))
    newcomer = Job(name)
    newcomer.train(range(2))
    restore(newcomer.state, image)
    assert_same(image_of(newcomer.state), image)
    newcomer.train(range(5, 8))
    assert_same(image_of(newcomer.state), image_of(job.state))
    if name == "power":
        assert any(name.startswith("comm_hook/error_dict") for name in image.tensors)


def test_capture_of_a_hook_of_whose_state_nothing_is_known_is_refused() -> None:
    model = DistributedDataParallel(nn.Linear(1, 1))
    model.register_comm_hook([0], lambda state, bucket: counted(state, bucket))
    with pytest.raises(LeafError, match="communication hook with a list as its state") as caught:
        TrainingState([model], [], {})
    assert caught.value.name == "model"


def test_capture_of_a_hook_that_was_registered_later_is_refused() -> None:
    model = DistributedDataParallel(nn.Linear(1, 1))
    state = TrainingState([model], [], {})
    model.register_comm_hook(Counting(), counted)
    with pytest.raises(LeafError, match="registered after"):
        state.collect()
