"""The comparison behind `identical: yes`: each kind of difference must be found and named."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from outcome import Recorder, compare, save_final_state

Change = Callable[[dict[str, Any]], None]


def make_run(folder: Path) -> None:
    """A run of one rank, three steps."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    record = Recorder(folder, 0)
    for step in (1, 2, 3):
        record.delivered(step, [step * 10, step * 10 + 1])
        loss = model(torch.randn(5, 3)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        record.committed(step, loss.item())
    save_final_state(folder, 0, model, optimizer, scheduler)


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    make_run(tmp_path / "faulted")
    make_run(tmp_path / "undisturbed")
    return tmp_path / "faulted", tmp_path / "undisturbed"


def edit_state(folder: Path, change: Change) -> None:
    state = torch.load(folder / "rank0.pt", weights_only=True)
    change(state)
    torch.save(state, folder / "rank0.pt")


def edit_lines(folder: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    (path,) = folder.glob("positions-0.*.jsonl")
    lines = change([json.loads(line) for line in path.read_text().splitlines()])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_outcome_of_equal_runs_is_identical(runs: tuple[Path, Path]) -> None:
    result = compare(*runs, num_ranks=1)
    assert result.differences == []
    assert result.identical
    assert result.num_batches == 3


def test_outcome_covers_parameters_buffers_optimizer_and_random_states(runs: tuple[Path, Path]) -> None:
    state = torch.load(runs[0] / "rank0.pt", weights_only=True)
    names = set(state["tensors"])
    assert {"parameter 0.weight", "buffer 1.running_mean", "optimizer 0.weight exp_avg", "random torch"} <= names
    assert {"random python", "random numpy MT19937"} <= names
    assert {"group 0", "LambdaLR"} <= set(state["values"])


def flip_lowest_bit(name: str) -> Change:
    def change(state: dict[str, Any]) -> None:
        state["tensors"][name].view(-1).view(torch.uint8)[0] ^= 1

    return change


def negate_zero(state: dict[str, Any]) -> None:
    state["tensors"]["parameter 1.bias"].zero_().neg_()


def set_zero(state: dict[str, Any]) -> None:
    state["tensors"]["parameter 1.bias"].zero_()


@pytest.mark.parametrize(
    "name", ["parameter 0.weight", "buffer 1.running_var", "optimizer 1.bias exp_avg_sq", "random torch"]
)
def test_outcome_with_one_bit_flipped_is_named(runs: tuple[Path, Path], name: str) -> None:
    edit_state(runs[0], flip_lowest_bit(name))
    result = compare(*runs, num_ranks=1)
    assert not result.identical
    (difference,) = result.differences
    assert difference.startswith(f"rank 0: {name} differs in 1 of ")


def test_outcome_with_a_negative_zero_is_a_difference(runs: tuple[Path, Path]) -> None:
    edit_state(runs[0], negate_zero)
    edit_state(runs[1], set_zero)
    assert not compare(*runs, num_ranks=1).identical


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["tensors"].pop("random torch"), "random torch is there in one run only"),
        (lambda s: s["values"].update({"group 0": "lr=1"}), "group 0 is lr=1"),
        (lambda s: s["tensors"].update({"parameter 0.bias": torch.zeros(4, dtype=torch.float64)}), "torch.float64"),
    ],
)
def test_outcome_with_another_state_is_named(runs: tuple[Path, Path], change: Change, message: str) -> None:
    edit_state(runs[0], change)
    (difference,) = compare(*runs, num_ranks=1).differences
    assert message in difference


def test_outcome_of_a_rank_that_left_nothing_is_a_difference(runs: tuple[Path, Path]) -> None:
    (difference,) = compare(*runs, num_ranks=2).differences[:1]
    assert "rank 1 left no final state" in difference


def test_outcome_of_steps_done_twice_alike_is_identical(runs: tuple[Path, Path]) -> None:
    edit_lines(runs[0], lambda lines: [*lines, *lines[2:]])
    assert compare(*runs, num_ranks=1).identical


def test_outcome_of_a_step_whose_process_died_before_recording_it_is_identical(runs: tuple[Path, Path]) -> None:
    edit_lines(runs[0], lambda lines: [line for line in lines if line.get("step") != 2])
    assert not compare(*runs, num_ranks=1).identical
    (runs[0] / "positions-0.999999999.jsonl").write_text("")
    assert compare(*runs, num_ranks=1).identical


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [*lines, {**lines[0], "positions": [7]}],
        lambda lines: [*lines, {**lines[1], "loss": 0.5}],
        lambda lines: [*lines, {"delivered": 4, "positions": [40, 41]}],
        lambda lines: [line for line in lines if line.get("delivered") != 2],
    ],
)
def test_outcome_with_other_batches_is_a_difference(runs: tuple[Path, Path], change: Any) -> None:
    edit_lines(runs[0], change)
    assert len(compare(*runs, num_ranks=1).differences) == 1
