"""Dies at an exact point of an exact step, once: fault injection for train_gpt.py, kept out of its sight.

In: specifications "STEP:RANK:PHASE" or "STEP:RANK:PHASE:node". Out: this process SIGKILLs itself there (with ":node"
its agent first, so that the node dies). A marker file in the run's folder, made with O_EXCL just before, says that a
kill has happened: the replacement, which passes the same point again, lives. It holds the time and the process.

forward, backward   in the middle of them: when the middle block has done its part
before_gate         before optimizer.step() begins
in_step             between two parameter groups: the first is updated, the second is not
after_step          right after optimizer.step(), before the step is left
shipping            5 ms after train_step returned, from a timer thread, while the shard is captured and sent
between             in the loop's body, after the step was committed
"""

import functools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

PHASES = ("forward", "backward", "before_gate", "in_step", "after_step", "shipping", "between")
SHIPPING_DELAY_S = 0.005


@dataclass(frozen=True, slots=True)
class Kill:
    step: int
    rank: int
    phase: str
    node: bool = False

    @classmethod
    def parse(cls, text: str) -> "Kill":
        parts = text.split(":")
        if len(parts) not in (3, 4) or parts[2] not in PHASES or parts[3:] not in ([], ["node"]):
            raise ValueError(f"--kill {text}: expected STEP:RANK:PHASE[:node] with PHASE one of {', '.join(PHASES)}")
        return cls(int(parts[0]), int(parts[1]), parts[2], len(parts) == 4)

    @property
    def marker(self) -> str:
        return f"killed-{self.step}-{self.rank}-{self.phase}" + ("-node" if self.node else "")


def die(kill: Kill, folder: Path) -> None:
    """Does not return, unless this kill has happened before."""
    try:
        marker = os.open(folder / kill.marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return
    os.write(marker, json.dumps({"t": time.time(), "pid": os.getpid(), "rank": kill.rank, "step": kill.step}).encode())
    if kill.node:
        os.kill(int(os.environ["P2PSTATE_AGENT_PID"]), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


class KillPoints:
    """Watches one rank's steps from outside; without a kill for this rank it changes nothing."""

    def __init__(
        self, specs: Sequence[str], folder: Path, rank: int, middle: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self._kills = [kill for kill in map(Kill.parse, specs) if kill.rank == rank]
        self._folder = folder
        self._step: int | None = None  # the step being tried; None between steps and in a rehearsal
        if self._kills:
            middle.register_forward_hook(lambda *_: self._reached("forward"))
            middle.register_full_backward_hook(lambda *_: self._reached("backward"))
            self._wrap(optimizer)

    def _reached(self, phase: str) -> None:
        for kill in self._kills:
            if (kill.step, kill.phase) == (self._step, phase):
                die(kill, self._folder)

    def _wrap(self, optimizer: torch.optim.Optimizer) -> None:
        # outermost around step(), so before_gate precedes every hook; _init_group is called as each group's turn comes
        step, init_group = optimizer.step, optimizer._init_group
        num_groups_begun = 0

        @functools.wraps(step)  # keeps the mark that LR schedulers leave on it
        def stepping(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_groups_begun
            self._reached("before_gate")
            num_groups_begun = 0
            result = step(*args, **kwargs)
            self._reached("after_step")
            return result

        def beginning_group(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_groups_begun
            num_groups_begun += 1
            if num_groups_begun == 2:
                self._reached("in_step")
            return init_group(*args, **kwargs)

        optimizer.step = stepping  # type: ignore[method-assign]
        optimizer._init_group = beginning_group

    def around(self, train_step: Callable[[Any], Any], state: Any) -> Callable[[Any], Any]:
        """`train_step` with its step number known to the hooks, and the shipping kill armed when it returns."""
        if not self._kills:
            return train_step

        def watched(batch: Any) -> Any:
            self._step = None if state.rehearsing else batch.number
            try:
                result = train_step(batch)
                for kill in self._kills:
                    if (kill.step, kill.phase) == (self._step, "shipping"):
                        threading.Timer(SHIPPING_DELAY_S, die, (kill, self._folder)).start()
                return result
            finally:
                self._step = None

        return watched

    def between(self, step: int) -> None:
        for kill in self._kills:
            if (kill.step, kill.phase) == (step, "between"):
                die(kill, self._folder)
