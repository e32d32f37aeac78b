"""The process's random streams as one plain value, and back.

In: Python's ``random``, NumPy's global generator, torch's CPU generator, torch's generators of all CUDA devices if CUDA
was initialised; single generator objects. Out: values for ``encoding``; the same streams continued.
Invariants: reading draws nothing; after ``restore`` every stream continues exactly where it was read. The stream of the
current CUDA device goes to the current device, whatever its number is here, and the others follow in their order.
Known limit: streams hidden in C libraries are not seen.
"""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from p2pstate.state.errors import LeafError

__all__ = [
    "GeneratorState",
    "capture",
    "generator_kind",
    "generator_state",
    "is_generator",
    "kept",
    "make_generator",
    "restore",
    "set_generator_state",
]

_BIT_GENERATORS = {
    kind.__name__: kind
    for kind in (
        np.random.MT19937,
        np.random.PCG64,
        np.random.PCG64DXSM,
        np.random.Philox,
        np.random.SFC64,
    )
}
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_MAKEABLE = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in (random.Random, np.random.RandomState)}


def capture() -> dict[str, Any]:
    """All streams, as a plain value of about 13 kB."""
    state: dict[str, Any] = {
        "python": _python_state(random.getstate()),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = [generator.get_state().numpy().tobytes() for generator in _cuda_generators()]
    return state


def check(state: dict[str, Any]) -> None:
    """LeafError if ``restore`` could not use every stream of ``state`` here."""
    if "cuda" in state and not torch.cuda.is_available():
        raise LeafError("rng/cuda", "was captured, but this process has no CUDA device", "use a node with a GPU")
    if "cuda" in state:
        if type(state["cuda"]) is not list or any(type(raw) is not bytes for raw in state["cuda"]):
            raise LeafError("rng/cuda", "is not a list of streams", "this copy is damaged: use another one")
        num_here = len(_cuda_generators())
        if any(map(_has_drawn, state["cuda"][num_here:])):
            raise LeafError(
                "rng/cuda",
                f"holds the streams of {len(state['cuda'])} devices that were drawn from, and {num_here} are here",
                "use a node with as many GPUs",
            )


def restore(state: dict[str, Any]) -> None:
    """Sets every stream that ``capture`` read."""
    try:
        random.setstate(_python_tuple(state["python"]))
        np.random.set_state(state["numpy"])
        torch.set_rng_state(_byte_tensor(state["torch"]))
        if "cuda" in state:
            for generator, raw in zip(_cuda_generators(), state["cuda"], strict=False):
                generator.set_state(_byte_tensor(raw))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise LeafError("rng", f"cannot be set ({error})", "use another copy, or run without rng") from error


@contextmanager
def kept() -> Iterator[None]:
    """What the block draws is put back at its end: for what an undisturbed run does not do a second time."""
    streams = capture()
    try:
        yield
    finally:
        restore(streams)


def _cuda_generators() -> list[torch.Generator]:
    """One per device, that of the current device first."""
    torch.cuda.init()
    generators = list(torch.cuda.default_generators)
    generators.insert(0, generators.pop(torch.cuda.current_device()))
    return generators


def _has_drawn(raw: bytes) -> bool:
    """Whether the stream of a CUDA device, (seed, offset) of Philox, is not at its beginning."""
    return any(raw[8:])


def is_generator(value: Any) -> bool:
    """Whether ``value`` is a random generator object whose state can be captured and set."""
    return isinstance(value, _GENERATORS) and not isinstance(value, random.SystemRandom)


@dataclass(frozen=True, slots=True)
class GeneratorState:
    """Stands in a decoded tree where a generator was."""

    kind: str
    state: Any


def generator_kind(generator: Any) -> str:
    """What :func:`make_generator` makes another one of; states of one kind fit all generators of that kind."""
    if isinstance(generator, torch.Generator):
        return f"torch.{generator.device.type}"
    if isinstance(generator, np.random.Generator):
        return f"numpy.{generator.bit_generator.state['bit_generator']}"
    kind = type(generator)
    return f"{kind.__module__}.{kind.__qualname__}"


def make_generator(kind: str, name: str) -> Any:
    """A new generator. LeafError (with ``name``) for kinds that only the program itself can make."""
    if kind in ("torch.cpu", "torch.cuda"):
        return torch.Generator(kind.removeprefix("torch."))
    if kind.removeprefix("numpy.") in _BIT_GENERATORS:
        return np.random.Generator(_BIT_GENERATORS[kind.removeprefix("numpy.")]())
    if kind in _MAKEABLE:
        return _MAKEABLE[kind]()
    raise LeafError(name, f"is a {kind}, and none is here", "make one at this place before restoring")


def generator_state(generator: Any) -> Any:
    """The state of one generator object, as a plain value."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return _python_state(generator.getstate())


def set_generator_state(generator: Any, state: Any, name: str) -> None:
    """Continues ``generator`` from ``state``. LeafError (with ``name``) if the state is one of another kind."""
    try:
        if isinstance(generator, torch.Generator):
            generator.set_state(_byte_tensor(state))
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = state
        elif isinstance(generator, np.random.RandomState):
            generator.set_state(state)
        else:
            generator.setstate(_python_tuple(state))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        what = f"the captured state does not fit a {type(generator).__name__} ({error})"
        raise LeafError(name, what, "make the same kind of generator under this name") from error


def _python_state(state: tuple[Any, ...]) -> tuple[Any, ...]:
    """625 numbers as bytes (little endian): a tenth of the time and half of the space."""
    version, words, gauss = state
    packed = array("I", words)
    if sys.byteorder == "big":
        packed.byteswap()
    return version, packed.tobytes(), gauss


def _python_tuple(state: Any) -> tuple[Any, ...]:
    version, raw, gauss = state
    packed = array("I")
    packed.frombytes(raw)
    if sys.byteorder == "big":
        packed.byteswap()
    return version, tuple(packed), gauss


def _byte_tensor(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
