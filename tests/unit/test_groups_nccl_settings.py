"""groups/nccl_settings.py: torch leaves NCCL errors to us, and whoever wants it otherwise is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from p2pstate.errors import ConfigError
from p2pstate.groups.nccl_settings import NEEDED, apply, conflicts

SOURCE = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"


def test_every_variable_that_is_set_is_one_that_this_torch_reads() -> None:
    read = set(re.findall(r'"((?:TORCH_)?NCCL_\w+)"', SOURCE.read_text()))
    assert read.issuperset(NEEDED)
    assert read.issuperset(needed.former_name for needed in NEEDED.values() if needed.former_name)


def test_apply_sets_what_is_not_set_and_keeps_the_rest() -> None:
    environ = {"TORCH_NCCL_RETHROW_CUDA_ERRORS": "false", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}
    apply(environ)
    assert environ == {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", **dict.fromkeys(NEEDED, "0")}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        ("NCCL_ASYNC_ERROR_HANDLING", "3"),
        ("TORCH_NCCL_BLOCKING_WAIT", "true"),
        ("TORCH_NCCL_ENABLE_MONITORING", "1"),
        ("TORCH_NCCL_DESYNC_DEBUG", "what?"),
        ("TORCH_DISTRIBUTED_DEBUG", "detail"),
    ],
)
def test_value_that_contradicts_is_refused_by_name_and_nothing_is_set(name: str, value: str) -> None:
    environ = {name: value}
    with pytest.raises(ConfigError, match=rf"{name}={re.escape(value)}: .*; (unset it|use INFO)"):
        apply(environ)
    assert environ == {name: value}


def test_all_contradictions_are_told_at_once() -> None:
    names = ["TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_DESYNC_DEBUG"]
    assert [found.name for found in conflicts(dict.fromkeys(names, "1"))] == names


def test_what_torchrun_sets_by_itself_is_replaced_and_other_values_are_not() -> None:
    environ = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    apply(environ, under_torchrun=True)
    assert environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    with pytest.raises(ConfigError, match="HANDLING=2"):
        apply({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}, under_torchrun=True)
