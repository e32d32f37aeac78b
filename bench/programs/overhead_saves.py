"""What others do at every step: torch.save on rank 0, dcp.save, dcp.async_save without and with a stager that is kept.

In: the job, a folder in memory. Out: savers, each called after every step. DCP talks over stock gloo groups of its own
(one for saving in the background: two threads must not use one group). Every wait has a deadline.
"""

from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from overhead_model import Job
from overhead_numbers import SAVES
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict


class Saver(Protocol):
    def save(self) -> None:
        """Called by all ranks after a step; the state may change as soon as it returns."""

    def finish(self) -> None:
        """Wait for what is still being written."""


class TorchSave:
    """Rank 0 saves the whole state. What is sharded is gathered there first."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._job, self._path = job, folder / "state.pt"
        self._gather = any(hasattr(parameter, "placements") for parameter in job.model.parameters())

    def save(self) -> None:
        state: Any
        if self._gather:
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            state = get_state_dict(self._job.model, self._job.optimizer, options=options)
        else:
            state = self._job.state_dict()
        if dist.get_rank() == 0:
            torch.save(state, self._path)

    def finish(self) -> None:
        pass


class DcpSave:
    def __init__(self, job: Job, folder: Path, group: dist.ProcessGroup) -> None:
        self._job, self._group = job, group
        self._paths = [folder / "even", folder / "odd"]  # the newest whole checkpoint is not overwritten

    def save(self) -> None:
        self._paths.reverse()
        dcp.save(self._job.state_dict(), checkpoint_id=self._paths[0], process_group=self._group)

    def finish(self) -> None:
        pass


class DcpAsyncSave:
    """One save at a time: the next waits for the one before. ``stager``: keeps its memory from save to save."""

    def __init__(
        self, job: Job, folder: Path, group: dist.ProcessGroup, deadline_s: float, stager: DefaultStager | None
    ) -> None:
        self._job, self._group, self._deadline_s, self._stager = job, group, deadline_s, stager
        self._paths = [folder / "even", folder / "odd"]
        self._saving: Future[Any] | None = None

    def save(self) -> None:
        self.finish()
        self._paths.reverse()
        started = dcp.async_save(
            self._job.state_dict(),
            checkpoint_id=self._paths[0],
            process_group=self._group,
            async_stager=self._stager,
        )
        self._saving = started if isinstance(started, Future) else started.upload_completion

    def is_done(self) -> bool:
        """Whether what is being written is there."""
        return self._saving is None or self._saving.done()

    def finish(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result(self._deadline_s)


def savers(job: Job, folder: Path, deadline_s: float) -> dict[str, Saver]:
    """One per name in SAVES. All ranks call this at once."""
    folders = {name: folder / name for name in SAVES}
    for each in folders.values():
        each.mkdir(exist_ok=True)
    front, back = stock_gloo_group(deadline_s), stock_gloo_group(deadline_s)
    kept = DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
        )
    )
    return {
        "torch_save": TorchSave(job, folders["torch_save"]),
        "dcp_save": DcpSave(job, folders["dcp_save"], front),
        "dcp_async": DcpAsyncSave(job, folders["dcp_async"], back, deadline_s, None),
        "dcp_async_cached": DcpAsyncSave(job, folders["dcp_async_cached"], back, deadline_s, kept),
    }


def stock_gloo_group(deadline_s: float) -> dist.ProcessGroup:
    """A group of all ranks as torch makes it, although p2pstate makes the others in this process."""
    ours = distributed_c10d._new_process_group_helper
    distributed_c10d._new_process_group_helper = ours.__wrapped__
    try:
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s))
    finally:
        distributed_c10d._new_process_group_helper = ours
    return group
