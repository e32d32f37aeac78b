"""What the tests of ``p2pstate.state`` share: images of a state in a region of memory, and their comparison by bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


class Codes(torch.Tensor):
    """Says it is bfloat16; holds int8 codes and a scale. Traceable."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Codes:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.bfloat16)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes = codes
        self.scale = scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], meta: Any, size: Any, stride: Any) -> Codes:
        return Codes(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Codes(args[0].codes, args[0].scale)
        raise NotImplementedError(f"{func}")
