"""What a run leaves behind, and whether two runs left the same, bit for bit.

In: a rank's live objects at the end, its batches and losses on the way. Out, in the run's folder: rank<r>.pt (every
local parameter, buffer and optimizer tensor; scalars; random states) and positions-<rank>.<pid>.jsonl (a line when a
batch is delivered and one when its step is committed). `compare` reads two such folders. A process that was killed
leaves its lines, too: what was done twice must have been the same twice.
"""

import json
import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Recorder:
    """Appends to this process's file; a line written survives the process."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"positions-{rank}.{os.getpid()}.jsonl").open("a", buffering=1)
        self._positions: list[int] = []

    def delivered(self, number: int, positions: list[int]) -> None:
        self._positions = positions
        self._file.write(json.dumps({"delivered": number, "positions": positions}) + "\n")

    def committed(self, step: int, loss: float) -> None:
        self._file.write(json.dumps({"step": step, "positions": self._positions, "loss": loss}) + "\n")


def local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def random_states() -> dict[str, Tensor]:
    version, internal, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    states = {
        "python": torch.tensor([version, *internal]),
        "python gauss": torch.tensor([float("nan") if gauss is None else gauss], dtype=torch.float64),
        f"numpy {name}": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        "numpy rest": torch.tensor([float(value) for value in rest], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def save_final_state(folder: Path, rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, *others: Any) -> None:
    """Writes rank<r>.pt. `others` (scheduler, loader) have a state_dict of plain values."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors = {f"parameter {name}": local(tensor) for name, tensor in model.named_parameters()}
    tensors |= {f"buffer {name}": local(tensor) for name, tensor in model.named_buffers()}
    values = {type(other).__name__: repr(other.state_dict()) for other in others}
    for index, group in enumerate(optimizer.param_groups):
        values[f"group {index}"] = repr({key: value for key, value in sorted(group.items()) if key != "params"})
    for parameter, entries in optimizer.state.items():
        for key, value in entries.items():
            where = f"optimizer {names[id(parameter)]} {key}"
            if isinstance(value, Tensor):
                tensors[where] = local(value)
            else:
                values[where] = repr(value)
    tensors |= {f"random {name}": state for name, state in random_states().items()}
    partial = folder / f"rank{rank}.{os.getpid()}.partial"
    torch.save({"tensors": {name: tensor.cpu().clone() for name, tensor in tensors.items()}, "values": values}, partial)
    partial.replace(folder / f"rank{rank}.pt")


@dataclass(slots=True)
class Comparison:
    differences: list[str] = field(default_factory=list)
    num_tensors: int = 0
    num_bytes: int = 0
    num_batches: int = 0

    @property
    def identical(self) -> bool:
        return not self.differences and self.num_tensors > 0 and self.num_batches > 0


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def compare_states(result: Comparison, rank: int, left: dict[str, Any], right: dict[str, Any]) -> None:
    for kind in ("tensors", "values"):
        for name in sorted(left[kind].keys() ^ right[kind].keys()):
            result.differences.append(f"rank {rank}: {name} is there in one run only")
    for name in sorted(left["values"].keys() & right["values"].keys()):
        a, b = left["values"][name], right["values"][name]
        if a != b:
            result.differences.append(f"rank {rank}: {name} is {a}, undisturbed {b}")
    for name in sorted(left["tensors"].keys() & right["tensors"].keys()):
        a, b = left["tensors"][name], right["tensors"][name]
        result.num_tensors += 1
        result.num_bytes += a.nbytes
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            result.differences.append(
                f"rank {rank}: {name} is {a.dtype} {tuple(a.shape)}, not {b.dtype} {tuple(b.shape)}"
            )
        elif not torch.equal(bits(a), bits(b)):
            num_different = int((bits(a) != bits(b)).sum())
            result.differences.append(f"rank {rank}: {name} differs in {num_different} of {a.nbytes} bytes")


def read_positions(folder: Path, rank: int) -> tuple[list[dict[str, Any]], int]:
    """All lines of a rank's processes, and how many processes there were."""
    paths = sorted(folder.glob(f"positions-{rank}.*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()], len(paths)


def compare_positions(result: Comparison, rank: int, faulted: Path, undisturbed: Path) -> None:
    """Every batch delivered and every step committed, repetitions included, as in the undisturbed run; none missing."""
    reference: dict[tuple[str, int], dict[str, Any]] = {}
    for line in read_positions(undisturbed, rank)[0]:
        kind = "delivered" if "delivered" in line else "step"
        reference[kind, line[kind]] = line
    lines, num_processes = read_positions(faulted, rank)
    missing = set(reference)
    for line in lines:
        kind = "delivered" if "delivered" in line else "step"
        expected = reference.get((kind, line[kind]))
        missing.discard((kind, line[kind]))
        if line != expected:
            result.differences.append(f"rank {rank}: recorded {line}, undisturbed {expected}")
    result.num_batches += len({line["delivered"] for line in lines if "delivered" in line})
    # a process that dies between a commit and its loop's body has no chance to record that step
    unrecorded = sorted(number for kind, number in missing if kind == "step")
    undelivered = sorted(number for kind, number in missing if kind == "delivered")
    if undelivered or len(unrecorded) > num_processes - 1:
        result.differences.append(
            f"rank {rank}: batches {undelivered} never delivered, steps {unrecorded} not recorded"
        )


def compare(faulted: Path, undisturbed: Path, num_ranks: int) -> Comparison:
    """Compares what all ranks of two runs left. Missing files are differences, too."""
    result = Comparison()
    for rank in range(num_ranks):
        paths = [folder / f"rank{rank}.pt" for folder in (faulted, undisturbed)]
        absent = [path for path in paths if not path.exists()]
        if absent:
            result.differences += [f"rank {rank} left no final state: {path} is missing" for path in absent]
            continue
        left, right = (torch.load(path, weights_only=True) for path in paths)
        compare_states(result, rank, left, right)
        compare_positions(result, rank, faulted, undisturbed)
    return result
