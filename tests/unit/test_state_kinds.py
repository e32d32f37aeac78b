"""Whatever is captured can be restored in a process that has just been built, and what could not is refused at once."""

from __future__ import annotations

import random
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from state_zoo import Codes, assert_same, image_of, restore
from torch import nn

from p2pstate.state import LeafError, TrainingState


class Opaque(Codes):
    """Its context is no plain value."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Opaque:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.bfloat16)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:  # type: ignore[override]
        return ["codes", "scale"], print


def _codes(kind: type[Codes]) -> Codes:
    return kind(torch.arange(4, dtype=torch.int8), torch.full((1,), 0.5))


def _nested(layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=layout)


def _quantised() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_channel(torch.ones(2, 3), torch.ones(2), torch.zeros(2), 0, torch.qint8)


def _same_three_times() -> list[torch.Tensor]:
    tensor = torch.arange(3.0)
    return [tensor, tensor, tensor[1:]]


RESTORED: dict[str, Callable[[], Any]] = {
    "float8": lambda: torch.arange(3.0).to(torch.float8_e4m3fn),
    "uint16": lambda: torch.arange(3).to(torch.uint16),
    "complex, conjugate": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "four bits": lambda: torch.arange(4, dtype=torch.uint8).view(torch.uint4),
    "single number": lambda: torch.tensor(3.0),
    "empty": lambda: torch.empty(0, 3),
    "transposed": lambda: torch.arange(6.0).view(2, 3).T,
    "expanded": lambda: torch.arange(3.0)[:, None].expand(3, 4),
    "one memory": _same_three_times,
    "quantised": _quantised,
    "made in inference mode": lambda: torch.inference_mode()(lambda: torch.ones(3))(),
    "subclass": lambda: _codes(Codes),
    "numpy": lambda: [np.arange(6)[::-1], np.asfortranarray(np.ones((2, 3))), np.float32(3), np.array(["a", "bc"])],
    "numbers": lambda: [True, 1, 1.0, float("nan"), 1 << 200, 1j, None, "\ud800", b"\0", bytearray(b"x"), range(3)],
    "keys": lambda: {1: torch.ones(1), "1": torch.zeros(1), (1, "a"): [torch.ones(2)], None: 1, frozenset([1]): 2},
    "containers": lambda: [deque([torch.ones(2)], 3), Counter("aab"), OrderedDict(a=1), defaultdict(list, a=[1]), {1}],
    "torch": lambda: [torch.Size([1, 2]), torch.float16, torch.device("cuda:3")],
    "generators": lambda: [torch.Generator(), random.Random(3), np.random.default_rng(2), np.random.RandomState(2)],
    "one generator": lambda: np.random.default_rng(2),
}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "jagged": (lambda: _nested(torch.jagged), r"nested tensor; hold its values\(\) and offsets\(\)"),
    "nested": (lambda: _nested(torch.strided), "nested tensor"),
    "sparse": (lambda: torch.eye(2).to_sparse(), "sparse_coo tensor"),
    "meta": (lambda: torch.empty(2, device="meta"), "meta device"),
    "without a shape": (lambda: nn.UninitializedParameter(), "no shape yet"),
    "overlapping": (lambda: torch.ones(5).as_strided((3, 3), (1, 1)), "elements that share memory"),
    "subclass of an odd context": (lambda: _codes(Opaque), "context is no plain value; hold its parts"),
    "other subclass": (lambda: torch.ones(2).as_subclass(type("Own", (torch.Tensor,), {})), "cannot be told"),
    "function": (lambda: print, "not a plain value"),
    "array of objects": (lambda: np.array([None]), "not a plain value"),
}


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Extended(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.held = [value]

    def get_extra_state(self) -> Any:
        return self.held

    def set_extra_state(self, state: Any) -> None:
        self.held = state


def _in_object(value: Any) -> TrainingState:
    return TrainingState([], [], {"holder": Holder(value)})


def _in_extra(value: Any) -> TrainingState:
    return TrainingState([], [], {}, extra={} if value is None else {"value": value})


def _in_extra_state(value: Any) -> TrainingState:
    return TrainingState([Extended(value)], [], {})


def _with_optimizer(place: str, value: Any) -> TrainingState:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if value is not None:
        content: Any = optimizer.param_groups[0] if place == "group" else optimizer.state
        (content[model.weight] if place == "parameter" else content)["value"] = value
    return TrainingState([model], [optimizer], {})


PLACES: dict[str, Callable[[Any], TrainingState]] = {
    "object": _in_object,
    "extra": _in_extra,
    "extra state": _in_extra_state,
    "optimizer": lambda value: _with_optimizer("optimizer", value),
    "parameter's state": lambda value: _with_optimizer("parameter", value),
    "group": lambda value: _with_optimizer("group", value),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", RESTORED)
def test_restore_of_what_was_captured_works_where_nothing_of_its_kind_is_yet(kind: str, place: str) -> None:
    build, make = PLACES[place], RESTORED[kind]
    owner = build(make())
    image = image_of(owner)
    newcomer = build(None)
    restore(newcomer, image)
    assert_same(image_of(newcomer), image)
    restore(owner, image)  # a survivor, which has it
    assert_same(image_of(owner), image)


@pytest.mark.parametrize(
    ("kind", "place"),
    # The state of a parameter is made by the newcomer's optimizer in its rehearsal.
    [each for each in product(REFUSED, PLACES) if each != ("subclass of an odd context", "parameter's state")],
)
def test_capture_of_what_no_newcomer_could_make_is_refused(kind: str, place: str) -> None:
    make, why = REFUSED[kind]
    with pytest.raises(LeafError, match=why):
        PLACES[place](make())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_capture_and_restore_in_any_mode_leave_it_and_make_what_can_be_trained(mode: Callable[[], Any]) -> None:
    def build() -> tuple[nn.Linear, torch.optim.Optimizer, TrainingState]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters())
        return model, optimizer, TrainingState([model], [optimizer], {}, extra={"i": torch.inference_mode()(_ones)()})

    def step(model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer, state = build()
    step(model, optimizer)
    image = image_of(state)
    newcomer = build()
    with mode():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        state.collect()
        restore(state, image)
        restore(newcomer[2], image)
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
    step(model, optimizer)
    step(newcomer[0], newcomer[1])
    assert_same(image_of(newcomer[2]), image_of(state))


def _ones() -> torch.Tensor:
    return torch.ones(2)
