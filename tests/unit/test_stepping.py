"""Which blocks are steps, as far as this rank can tell alone."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import pytest

from p2pstate.block import StepBlock
from p2pstate.stepping import NUM_OPEN_BLOCKS, NUM_OPEN_WINDOWS, Stepping


def count(stepping: Stepping, boundaries: Iterable[bool]) -> int:
    """How often it was said that no optimizer steps."""
    nobody: Any = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for boundary in boundaries:
            block = StepBlock(nobody, 1, "here")
            block.boundary = boundary
            stepping.count(block)
    assert all("none of the optimizers given" in str(each.message) for each in caught)
    return len(caught)


@pytest.mark.parametrize("window", [1, 4])
def test_stepping_that_ends_is_said_once_and_accumulation_is_no_end(window: int) -> None:
    nobody: Any = None
    stepping = Stepping({}, nobody, 1.0, "ignore")
    accumulating = [*[False] * (window - 1), True]
    assert count(stepping, accumulating * 3) == 0
    assert count(stepping, [False] * (NUM_OPEN_WINDOWS * window - 1)) == 0
    assert count(stepping, [False] * 5) == 1
    assert stepping.num_open_blocks == NUM_OPEN_WINDOWS * window + 4
    assert count(stepping, accumulating) == 0


def test_stepping_that_never_begins_is_said_once() -> None:
    nobody: Any = None
    assert count(Stepping({}, nobody, 1.0, "ignore"), [False] * (NUM_OPEN_BLOCKS + 5)) == 1
