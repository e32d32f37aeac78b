"""What the tests of ``p2pstate.state`` share: images of a state in a region of memory, and their comparison by bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from p2pstate.state import Collected, Layout, TrainingState


@dataclass(frozen=True)
class Image:
    """A state as a slot holds it."""

    layout: Layout
    region: torch.Tensor
    values: bytes

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return self.layout.read(self.region)


def image_of(state: TrainingState) -> Image:
    return image_of_collected(state.collect())


def image_of_collected(collected: Collected) -> Image:
    layout = Layout.build(collected.leaves)
    region = torch.zeros(max(layout.num_bytes, 1), dtype=torch.uint8)
    layout.write(collected.leaves, region)
    return Image(layout, region, collected.values)


def restore(state: TrainingState, image: Image) -> None:
    state.restore(image.tensors, image.values)


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return flat.reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(one: Image, other: Image) -> None:
    assert one.layout.table() == other.layout.table()
    there = other.tensors
    different = [name for name, tensor in one.tensors.items() if bits(tensor) != bits(there[name])]
    assert not different, different
    assert one.values == other.values
