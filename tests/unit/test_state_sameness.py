"""sameness: what is known of a state is used again as long as it is true, and not a change longer."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from state_zoo import Codes
from torch import nn

from p2pstate.capture import Capturer
from p2pstate.image_format import read_image
from p2pstate.slots import HEADER_BYTES, digest_of
from p2pstate.state import Leaf, LeafError, TrainingState
from p2pstate.state.sameness import SameMemory
from p2pstate.types import Version

NUM_BLOCKS = 300  # of four parameters
MAX_PAYLOAD_BYTES = 64 << 10


class Job:
    def __init__(self, num_blocks: int = 2) -> None:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(num_blocks)]
        self.model = nn.Sequential(*blocks)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.linear: Any = blocks[0][0]
        self.norm: Any = blocks[0][1]
        self.state = self.look_anew()

    def look_anew(self) -> TrainingState:
        return TrainingState([self.model], [self.optimizer], {}, rng=False)

    @property
    def first(self) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer.state[self.linear.weight]
        return state


def seen(leaves: list[Leaf]) -> list[tuple[Any, ...]]:
    tensors = [(leaf.name, leaf.tensor, leaf.holders) for leaf in leaves]
    return [(name, t.data_ptr(), t.shape, t.stride(), t.dtype, holders) for name, t, holders in tensors]


def test_collect_of_a_state_of_which_only_values_change_gives_the_same_leaves() -> None:
    job = Job()
    before = job.state.collect()
    with torch.no_grad():
        job.linear.weight += 1
        job.norm.running_mean.fill_(5)
        job.first["exp_avg"].zero_()
        job.optimizer.param_groups[0]["lr"] = 0.5
    after = job.state.collect()
    assert after.leaves is before.leaves
    assert after.values != before.values, "the rate is another one"
    assert after.values == job.look_anew().collect().values


def swap_names(job: Job) -> None:
    parameters = job.linear._parameters
    parameters["weight2"] = parameters.pop("weight")


def move_to_the_next_module(job: Job) -> None:
    job.model[0].register_module("extra", nn.Module())
    job.state.collect()
    job.model[0].extra.register_parameter("bias", job.linear._parameters.pop("bias"))


CHANGES: dict[str, Callable[[Job], Any]] = {
    "a buffer is assigned anew": lambda job: setattr(job.norm, "running_mean", torch.ones(3)),
    "a buffer grows": lambda job: job.norm.running_mean.resize_(7),
    "a buffer vanishes": lambda job: setattr(job.norm, "running_var", None),
    "a buffer appears": lambda job: job.linear.register_buffer("scale", torch.ones(1)),
    "a parameter's data is swapped": lambda job: setattr(job.linear.weight, "data", torch.ones(3, 3)),
    "a parameter's data has other strides": lambda job: setattr(job.linear.weight, "data", job.linear.weight.data.t()),
    "a parameter has another type": lambda job: setattr(
        job.linear.weight, "data", job.linear.weight.data.view(torch.int32).view(torch.float32).double()
    ),
    "a buffer's bytes mean another type": lambda job: setattr(
        job.norm.running_mean, "data", job.norm.running_mean.data.view(torch.int32)
    ),
    "a parameter is frozen": lambda job: job.linear.weight.requires_grad_(False),
    "a parameter has another name": swap_names,
    "a parameter is another module's": move_to_the_next_module,
    "a module evaluates": lambda job: job.norm.eval(),
    "a state's tensor is another one": lambda job: job.first.update(exp_avg=torch.ones(3, 3)),
    "a state's tensor grows": lambda job: job.first["exp_avg_sq"].resize_(5),
    "a state gets a number": lambda job: job.first.update(note=3),
    "a state gets a tensor": lambda job: job.first.update(more=torch.ones(2)),
    "a state loses a tensor": lambda job: job.first.pop("exp_avg"),
    "a state has another order": lambda job: job.first.update(step=job.first.pop("step")),
    "a parameter has no state": lambda job: job.optimizer.state.pop(job.linear.weight),
    "there is state beside that of parameters": lambda job: job.optimizer.state.update({"ema": {"x": torch.ones(1)}}),
    "a group is added": lambda job: (
        job.model.register_parameter("late", nn.Parameter(torch.ones(2))),
        job.optimizer.add_param_group({"params": [job.model.late]}),
    ),
    "a group loses a parameter": lambda job: job.optimizer.param_groups[0]["params"].pop(0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_collect_after_a_change_sees_what_a_new_look_sees(change: str) -> None:
    job = Job()
    job.state.collect()
    CHANGES[change](job)
    found, anew = job.state.collect(), job.look_anew().collect()
    assert seen(found.leaves) == seen(anew.leaves)
    if not any(word in change for word in ("buffer", "type")):  # what was so when it was built, the older one knows
        assert found.values == anew.values
    again = job.state.collect()
    assert (seen(again.leaves), again.values) == (seen(found.leaves), found.values)


def test_memory_of_the_same_tensors_is_the_same_until_one_of_them_moves() -> None:
    tensors = [torch.ones(3), nn.Parameter(torch.ones(2, 2)), torch.empty(0), torch.ones(())]
    memory = SameMemory(tensors)
    assert memory.holds()
    tensors[0].add_(1)
    assert memory.holds()
    tensors[0].data = torch.ones(3)
    assert not memory.holds()


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2, dtype=torch.complex64).conj().imag],
    ids=["conjugate", "negative"],
)
def test_memory_of_views_that_compute_is_never_known(tensor: torch.Tensor) -> None:
    assert not SameMemory([tensor]).holds()
    assert not SameMemory([torch.ones(1), Codes(torch.zeros(2, dtype=torch.int8), torch.ones(1))]).holds()


class Memory:
    """Stands for the line to the agent: gives out memory."""

    def allocate(self, part: Any, index: int, num_bytes: int) -> int:
        fd = os.memfd_create(f"test-{index}")
        os.ftruncate(fd, max(num_bytes, 1) + HEADER_BYTES)
        return fd


def test_plain_model_of_more_than_a_thousand_parameters_ships_less_than_64_kib() -> None:
    """Under DistributedDataParallel, as far as what is captured tells: all tensors are on both nodes."""
    job = Job(NUM_BLOCKS)
    for module in job.model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean = module.running_var = module.num_batches_tracked = None
    found = TrainingState([job.model], [job.optimizer], {}).collect()
    assert sum(leaf.name.startswith("model/") for leaf in found.leaves) == 4 * NUM_BLOCKS
    leaves = [Leaf(leaf.name, leaf.tensor, (0, 1)) for leaf in found.leaves]
    link: Any = Memory()
    own, *_ = Capturer(link, 0, (0, 1)).capture(type(found)(leaves, found.values, {}), Version(0, 1), None)
    assert own.part.kind == "own"
    assert own.num_bytes < MAX_PAYLOAD_BYTES / 2


def memory_swapped(model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    model.weight.data = torch.full_like(model.weight, 5.0)


def state_swapped(model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    average = optimizer.state[model.weight]["exp_avg"]
    average.data = torch.full_like(average, 6.0)


def half(model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    model.half()


def put_elsewhere(model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    before, model.weight = model.weight, nn.Parameter(torch.full_like(model.weight, 7.0))
    optimizer.param_groups[0]["params"][0] = model.weight
    optimizer.state[model.weight] = optimizer.state.pop(before)


@pytest.mark.parametrize("change", [memory_swapped, state_swapped, half, put_elsewhere])
def test_large_leaves_in_other_memory_are_captured_from_there(
    change: Callable[[nn.Linear, torch.optim.Optimizer], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    model = nn.Linear(1024, 600)  # more than is copied and hashed at once
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    state, link = TrainingState([model], [optimizer], {}, rng=False), Memory()
    capturer = Capturer(link, 0, (0,))  # type: ignore[arg-type]
    for step in range(4):
        if step == 2:
            change(model, optimizer)
        found = state.collect()
        (image,) = capturer.capture(found, Version(1, step), Version(1, step - 1))
        assert image.digest == digest_of(image.body[:])
        tensors, _ = read_image(torch.frombuffer(image.body, dtype=torch.uint8))
        assert tensors.keys() == {leaf.name for leaf in found.leaves}
        for leaf in TrainingState([model], [optimizer], {}, rng=False).collect().leaves:
            assert torch.equal(tensors[leaf.name], leaf.tensor), leaf.name


def test_parameter_that_the_optimizer_does_not_follow_is_refused_by_name() -> None:
    job = Job()
    job.linear.weight = nn.Parameter(torch.ones(3, 3))
    with pytest.raises(LeafError, match="holds a parameter of shape"):
        job.state.collect()
