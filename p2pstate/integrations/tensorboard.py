"""TensorBoard as a tracker: ``state.track(TensorBoard("runs/today"))``. Needs ``p2pstate[tensorboard]``.

In: numbers of rank 0, by step. Out: event files in a directory. A process that replaces rank 0 writes a file of its
own there; steps that come again after a fault replace what was told of them before.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["TensorBoard"]


class TensorBoard:
    """observe.tracking.Tracker. Nothing is opened before the first numbers come, so any rank may make one. Raises
    ImportError, with what to install, when TensorBoard is missing."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("TensorBoard is not installed: pip install 'p2pstate[tensorboard]'") from error
        self._directory, self._open = os.fspath(directory), SummaryWriter
        self._writer: SummaryWriter | None = None
        self._newest = 0

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is not None and step <= self._newest:
            self._writer.close()
            self._writer = None
        if self._writer is None:
            self._writer = self._open(self._directory, purge_step=step)
        self._newest = step
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()
