"""A small model that optimizers of any kind train for some steps, and its state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from state_zoo import bits
from torch import nn

from p2pstate.state import TrainingState


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 1) -> None:
    dtype = next(model.parameters()).dtype
    for index in range(count):

        def loss(index: int = index) -> torch.Tensor:
            optimizer.zero_grad()
            value = model(torch.full((2, 3), 0.1 * (index + 1), dtype=dtype)).square().sum()
            value.backward()
            return value

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(loss)
        else:
            loss()
            optimizer.step()


def state_of(model: nn.Module, *optimizers: torch.optim.Optimizer) -> TrainingState:
    return TrainingState([model], optimizers, {}, rng=False)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw loop": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adamw tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, history_size=3),
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        alike = (type(one), one.dtype, one.shape) == (type(other), other.dtype, other.shape)
        return alike and bits(one) == bits(other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
