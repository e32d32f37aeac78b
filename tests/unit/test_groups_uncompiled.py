"""uncompiled: Dynamo compiles neither where it would begin with a function nor where it would inline it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from p2pstate.groups.group import P2PGroup
from p2pstate.groups.uncompiled import uncompiled


def sine(x: Tensor) -> Tensor:
    return x.sin()


@uncompiled
def cosine(x: Tensor) -> Tensor:
    return x.cos()


@uncompiled
class Sizes:
    def call(self, x: Tensor) -> Tensor:
        return x.exp()


@pytest.mark.parametrize(
    ("function", "alone"), [(sine, False), (cosine, True), (Sizes().call, True)], ids=["neither", "function", "method"]
)
@pytest.mark.parametrize("inlined", [True, False], ids=["called by Python", "called by C"])
def test_what_is_uncompiled_is_in_no_graph(function: Callable[[Tensor], Tensor], alone: bool, inlined: bool) -> None:
    torch._dynamo.reset()
    seen = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    @torch.compile(backend=backend)
    def compiled(x: Tensor) -> Tensor:
        if inlined:
            return function(x) * 2
        torch._dynamo.graph_break()
        return max([x], key=function) * 2

    compiled(torch.ones(1))
    assert ({"sin", "cos", "exp"} & set(seen) == set()) == alone, seen


def test_groups_are_left_alone() -> None:
    assert P2PGroup.broadcast._torchdynamo_disable
