"""What one rank of the overhead benchmark runs, under p2prun: steps with and without protection, floors, saves.

Arguments: parallelism, folder for the result, folder in memory for saves, settings as JSON. Out: every rank's records
in FOLDER/ranks.json and lines about the progress in FOLDER/progress, both written by rank 0.

A protected window is a loop of its own (``state.run`` up to so many more steps); an unprotected one calls the same
step outside of any loop, where p2pstate does nothing but forward collectives to gloo. The first steps of each window do
not count. After the last step of a loop nothing else runs while its version is being shipped.
"""

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from overhead_floors import Memcpy, Sockets
from overhead_model import Job, build
from overhead_numbers import MIN_ROUNDS, SAVES, Settings
from overhead_saves import savers
from overhead_shipping import Shipping

import p2pstate
from p2pstate.state import TrainingState
from p2pstate.worker.context import current

NUM_WARM_UP_STEPS = 4  # the optimizer's state comes to exist, slots grow to their size, DDP rebuilds its buckets


class Rank:
    def __init__(self, form: str, folder: Path, settings: Settings) -> None:
        self._settings, self._folder = settings, folder
        self.number = dist.get_rank()
        self.job: Job = build(form, settings.num_parameters, settings.batch, self.number)
        self._state = p2pstate.Replicator(self.job.model, self.job.optimizer, data=self.job.data)
        self._batches: Iterator[torch.Tensor] = iter(self.job.data)
        self.skipped: list[list[bool]] = []
        self.protected_s: list[float] = []
        self.capture_s: list[float] = []
        self.wait_s: list[float] = []
        self.num_captured = self.num_shipped_bytes = 0

    def say(self, line: str) -> None:
        if self.number == 0:
            with (self._folder / "progress").open("a") as file:
                file.write(line + "\n")

    def warm_up(self) -> None:
        self.plain_window(0, NUM_WARM_UP_STEPS)
        self.protected_window(0, NUM_WARM_UP_STEPS)

    def plain_window(
        self, num_counted: int, num_uncounted: int, after: Callable[[], None] = lambda: None
    ) -> list[float]:
        """Seconds of each counted step; ``after`` is called at the end of every step."""
        seconds = []
        last = time.monotonic()
        for _ in range(num_uncounted + num_counted):
            self.job.train_step(next(self._batches))
            after()
            now = time.monotonic()
            seconds.append(now - last)
            last = now
        return seconds[num_uncounted:]

    def protected_window(self, num_counted: int, num_uncounted: int) -> list[float]:
        """The same in a protected loop; with ``num_counted`` of 0 nothing of it is recorded."""
        state, stats = self._state, self._state.stats
        seconds: list[float] = []
        skipped: list[bool] = []
        num_before, num_skipped, num_bytes = stats.num_captured, stats.num_skipped, stats.num_shipped_bytes
        num_waits = len(stats.wait_s)
        last = time.monotonic()
        for _ in state.run(self.job.train_step, steps=state.committed_step + num_uncounted + num_counted):
            now = time.monotonic()
            seconds.append(now - last)
            skipped.append(stats.num_skipped > num_skipped)
            last, num_skipped, num_in_steps = now, stats.num_skipped, stats.num_captured - num_before
        if num_counted:
            num_new = stats.num_captured - num_before
            self.num_captured += num_new
            self.num_shipped_bytes += stats.num_shipped_bytes - num_bytes
            protected_s, capture_s = newest(stats.protected_s, num_new), newest(stats.capture_s, num_new)
            self.protected_s += protected_s[:num_in_steps]
            self.capture_s += capture_s[:num_in_steps]
            self.wait_s += newest(stats.wait_s, len(stats.wait_s) - num_waits)
            self.skipped.append(skipped[num_uncounted:])
        return seconds[num_uncounted:]

    def is_late(self, number: int, end: float) -> bool:
        """Whether round ``number`` is to be the last: no time is left. All ranks call this at once."""
        late = torch.tensor([number >= MIN_ROUNDS and time.monotonic() > end])
        dist.broadcast(late, 0)
        return bool(late.item())

    def rounds(self, memcpy: Memcpy, sockets: Sockets) -> dict[str, Any]:
        """Windows with and without protection, the floors and shipping alone, in turns."""
        settings = self._settings
        windows: dict[str, list[list[float]]] = {"plain": [], "protected": []}
        cpu_s: dict[str, list[float]] = {"plain": [], "protected": []}
        floors: dict[str, list[list[float]]] = {"memcpy": [], "socket": [], "ship": []}
        shipping = Shipping(self._state, settings.deadline_s)
        kinds = [("plain", self.plain_window, 0), ("protected", self.protected_window, settings.num_uncounted)]
        for number in range(1, settings.num_rounds + 1):
            for kind, window, num_uncounted in kinds:
                began_s = time.process_time()
                windows[kind].append(window(settings.num_steps, num_uncounted))
                cpu_s[kind].append((time.process_time() - began_s) / (settings.num_steps + num_uncounted))
            kinds.reverse()  # neither is always the first
            floors["memcpy"].append(memcpy.once())
            floors["socket"].append(sockets.once())
            floors["ship"].append(shipping.once())
            self.say(f"steps with and without protection: {number} of {settings.num_rounds}")
            if self.is_late(number, settings.rounds_end):
                break
        return {"windows": windows, "cpu_s": cpu_s, **floors}

    def saves(self, scratch: Path) -> tuple[dict[str, list[list[float]]], dict[str, list[float]]]:
        """Windows per kind of saving, and the seconds that the calls themselves took."""
        settings = self._settings
        by_name = savers(self.job, scratch, settings.deadline_s)
        windows: dict[str, list[list[float]]] = {name: [] for name in ("plain", *SAVES)}
        calls: dict[str, list[float]] = {name: [] for name in SAVES}
        for name, saver in by_name.items():  # folders, plans and staging memory come to exist
            self.plain_window(0, 1, saver.save)
            saver.finish()
            self.say(f"{name} works")
        order = deque(("plain", *SAVES))
        for number in range(1, settings.num_save_rounds + 1):
            for name in order:
                if name == "plain":
                    windows[name].append(self.plain_window(settings.num_save_steps, 0))
                    continue
                save = timed(by_name[name].save, calls[name])
                windows[name].append(self.plain_window(settings.num_save_steps, settings.num_uncounted, save))
                by_name[name].finish()
            order.rotate(2)
            self.say(f"saving at every step: {number} of {settings.num_save_rounds}")
            if self.is_late(MIN_ROUNDS, settings.saves_end):
                break
        return windows, calls

    def unique_bytes(self) -> float:
        """This rank's part of the job's state: what n ranks hold alike counts as an n-th."""
        found = TrainingState([self.job.model], [self.job.optimizer], {"data": self.job.data}).collect()
        sizes = [(leaf.tensor.numel() * leaf.tensor.element_size(), len(leaf.holders)) for leaf in found.leaves]
        return len(found.values) + sum(num_bytes / num_holders for num_bytes, num_holders in sizes)

    @property
    def num_own_bytes(self) -> int:
        """Of the newest version: what is shipped."""
        return self._state.stats.num_own_bytes

    @property
    def captured_bytes(self) -> int:
        return self._state.stats.num_own_bytes + self._state.stats.num_shared_bytes


def timed(call: Callable[[], None], into: list[float]) -> Callable[[], None]:
    def run() -> None:
        began = time.monotonic()
        call()
        into.append(time.monotonic() - began)

    return run


def newest(series: deque[float], count: int) -> list[float]:
    return list(series)[len(series) - count :]


def vault_bytes(agent_pid: int) -> int:
    """Memory of the slots that an agent keeps; a slot that is open twice counts once."""
    found: dict[int, int] = {}
    for entry in os.scandir(f"/proc/{agent_pid}/fd"):
        with suppress(FileNotFoundError):  # the agent opens and closes others meanwhile
            if os.readlink(entry.path).startswith("/memfd:p2pstate-"):
                status = os.stat(entry.path)
                found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


def main() -> None:
    form, folder, scratch, settings = (
        sys.argv[1],
        Path(sys.argv[2]),
        Path(sys.argv[3]),
        Settings(**json.loads(sys.argv[4])),
    )
    p2pstate.init_process_group(timeout=timedelta(seconds=settings.deadline_s))
    rank = Rank(form, folder, settings)
    rank.say("started")
    rank.warm_up()
    context = current()
    (buddy,) = context.buddies
    with Sockets(rank.num_own_bytes, buddy, settings.deadline_s) as sockets:
        record = rank.rounds(Memcpy(rank.captured_bytes), sockets)
    record |= {
        "skipped": rank.skipped,
        "protected_s": rank.protected_s,
        "capture_s": rank.capture_s,
        "wait_s": rank.wait_s,
        "payload_bytes": round(rank.num_shipped_bytes / rank.num_captured),
        "captured_bytes": rank.captured_bytes,
        "unique_bytes": rank.unique_bytes(),
        "vault_bytes": vault_bytes(int(os.environ["P2PSTATE_AGENT_PID"])) if context.local_rank == 0 else 0,
    }
    record["saves"], record["calls"] = rank.saves(scratch)
    records: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(records, record)
    if rank.number == 0:
        (folder / "ranks.json").write_text(json.dumps(records))


if __name__ == "__main__":
    main()
