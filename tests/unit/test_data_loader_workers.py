"""Workers of a Loader that die, stop, hang or raise; and how they end."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.utils.data
from loader_data import SOON_S, Drawing, everything, plain, worker_pids
from torch.utils.data import get_worker_info

from p2pstate.data import Loader, LoaderError

pytestmark = pytest.mark.usefixtures("closed_loaders")


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_loader_whose_worker_is_lost_goes_on_exactly(
    unfaulted: list[Any], blow: signal.Signals, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pstate.data.pool.LOOK_EVERY_S", 0.1)
    monkeypatch.setattr("p2pstate.data.pool.STOPPED_FOR_S", 0.2)
    loader = Loader(Drawing(), 4, shuffle=True, num_workers=2, seed=3, epochs=3)
    seen = []
    for batch in loader:
        seen.append(plain(batch))
        if len(seen) in (3, 9):
            os.kill(worker_pids(loader)[0], blow)
    assert seen == unfaulted
    assert caplog.text.count("Another process takes its place") == 2
    assert ("was killed by SIGKILL" if blow == signal.SIGKILL else "was stopped by a signal") in caplog.text


class Deadly(Drawing):
    def __getitem__(self, index: int) -> Any:
        if index == 6 and get_worker_info() is not None:
            os._exit(7)
        return super().__getitem__(index)


def test_loader_whose_workers_die_of_a_sample_names_it(caplog: pytest.LogCaptureFixture) -> None:
    loader = Loader(Deadly(), 4, num_workers=2)
    batches = iter(loader)
    assert plain(next(batches))[0] == [0, 1, 2, 3]
    with pytest.raises(LoaderError, match=r"exit code 7; it was reading epoch 0, samples \[4, 5, 6, 7\].*3 processes"):
        next(batches)
    assert loader.state_dict()["position"]["samples"] == 4


class Hanging(Drawing):
    def __getitem__(self, index: int) -> Any:
        if index == 5:
            time.sleep(SOON_S)
        return super().__getitem__(index)


def test_loader_whose_data_set_hangs_says_so_in_time() -> None:
    loader = Loader(Hanging(), 4, num_workers=1, timeout=SOON_S)
    batches = iter(loader)
    next(batches)
    loader._engine._pool.timeout_s = 0.5  # only now: a worker may take its time to start on a busy machine
    for _ in range(2):  # also when it is tried again
        with pytest.raises(LoaderError, match=r"gave no batch for 0.5 s; it is at epoch 0, samples \[4, 5, 6, 7\]"):
            next(batches)


class Raising(Drawing):
    def __init__(self, error: BaseException, until: Path) -> None:
        super().__init__()
        self.error, self.until = error, until

    def __getitem__(self, index: int) -> Any:
        if index == 9 and not self.until.exists():
            raise self.error
        return super().__getitem__(index)


class Speaking(Exception):
    """Has a message of its own, which ExceptionWrapper takes for an argument."""

    message = "it"


class Odd(Exception):
    """Cannot be made of one string."""

    def __init__(self, number: int, *, reason: str) -> None:
        super().__init__(f"{number} {reason}")


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("error", "arrives_as"),
    [
        (ValueError("a broken picture"), ValueError),
        (KeyError("a broken picture"), KeyError),
        (StopIteration("a broken picture"), RuntimeError),
        (SystemExit("a broken picture"), RuntimeError),
        (Odd(1, reason="a broken picture"), RuntimeError),
        (ExceptionGroup("two", [ValueError("a broken picture"), OSError()]), RuntimeError),
        (Speaking("a broken picture"), RuntimeError),
        (type("Nameless", (Exception,), {})("a broken picture"), Exception),  # no other process finds its class
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_loader_raises_what_the_data_set_raised_with_the_sample_and_can_try_again(
    num_workers: int, error: BaseException, arrives_as: type[Exception], tmp_path: Path
) -> None:
    loader = Loader(Raising(error, tmp_path / "healed"), 4, num_workers=num_workers)
    batches = iter(loader)
    first = [plain(next(batches)), plain(next(batches))]
    for _ in range(2):
        with pytest.raises(arrives_as, match="sample 9") as caught:
            next(batches)
        assert "a broken picture" in str(caught.value)
        assert "in __getitem__" in str(caught.value)
    assert loader.state_dict()["position"]["samples"] == 8
    (tmp_path / "healed").touch()
    assert first + [plain(batch) for batch in batches] == everything(Loader(Drawing(), 4, num_workers=0))


def fail_to_begin(worker: int) -> None:
    raise OSError(f"no licence for worker {worker}")


def fail_to_collate(samples: list[Any]) -> Any:
    raise TypeError("cannot be stacked")


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"worker_init_fn": fail_to_begin, "num_workers": 2}, OSError, "no licence for worker 0"),
        ({"collate_fn": fail_to_collate, "num_workers": 1}, TypeError, r"samples \[0, 1\] \(in collate_fn\)"),
        ({"collate_fn": fail_to_collate, "num_workers": 0}, TypeError, r"samples \[0, 1\] \(in collate_fn\)"),
        ({"collate_fn": lambda _: lambda: 1, "num_workers": 1}, Exception, "cannot be sent to the trainer: epoch 0"),
    ],
)
def test_loader_raises_what_happens_around_the_data_set(
    arguments: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        next(iter(Loader(Drawing(), 2, **arguments)))


def hang_with_workers(pids: Any) -> None:
    loader = Loader(Hanging(), 1, num_workers=3)
    batches = iter(loader)
    next(batches)
    pids.put(loader.worker_pids)
    time.sleep(SOON_S)


def test_loader_workers_of_a_killed_trainer_are_gone_though_they_hang() -> None:
    context = multiprocessing.get_context("fork")
    pids = context.SimpleQueue()
    trainer = context.Process(target=hang_with_workers, args=(pids,))
    trainer.start()
    workers = [psutil.Process(pid) for pid in pids.get()]
    assert len(workers) == 3
    workers[0].suspend()
    trainer.kill()
    trainer.join(SOON_S)
    _, alive = psutil.wait_procs(workers, timeout=SOON_S)
    assert not alive


ENDING = """
import os, signal
from p2pstate.data import Loader

class Numbers:
    def __len__(self):
        return 10
    def __getitem__(self, index):
        return index

loader = Loader(Numbers(), 1, num_workers=2)
next(iter(loader))
os.kill(loader.worker_pids[0], signal.SIGSTOP)
"""


def test_loader_program_that_ends_does_not_wait_for_a_stopped_worker() -> None:
    subprocess.run([sys.executable, "-c", ENDING], check=True, timeout=120)


def test_loader_that_is_forgotten_ends_its_workers() -> None:
    loader = Loader(Drawing(), 4, num_workers=2)
    next(iter(loader))
    workers = [psutil.Process(pid) for pid in loader.worker_pids]
    loader.close()
    assert loader.worker_pids == []
    _, alive = psutil.wait_procs(workers, timeout=SOON_S)
    assert not alive
    assert len(everything(loader)) == 6  # and starts others when it is asked again


@pytest.mark.slow
def test_loader_works_with_spawned_workers(unfaulted: list[Any]) -> None:
    loader = Loader(Drawing(), 4, shuffle=True, num_workers=1, seed=3, multiprocessing_context="spawn")
    assert everything(loader) == unfaulted[:6]


class Talking(Drawing):
    def __getitem__(self, index: int) -> Any:
        print(f"reads {index}")
        return index

    def prefetch(self, indices: list[int]) -> None:
        print("prefetch fails")
        raise OSError("no line")


def test_loader_that_is_closed_ends_its_workers_though_those_of_another_were_forked_since() -> None:
    loaders = [Loader(Drawing(), 4, num_workers=1) for _ in range(2)]
    for loader in loaders:
        next(iter(loader))
    first = loaders[0]._engine._pool._workers[0].process
    loaders[0].close()
    assert first.exitcode == 0  # and was not killed because it waited for more
    loaders[1].close()


class Collecting(Drawing):
    """Collects garbage in whichever process reads it."""

    def __getitem__(self, index: int) -> Any:
        gc.collect()
        return index


class Cycle:
    """Garbage that only a collection finds; says where it was found."""

    def __init__(self, path: Path) -> None:
        self.path, self.itself = path, self

    def __del__(self) -> None:
        self.path.write_text(str(os.getpid()))


def test_garbage_of_the_trainer_is_not_collected_in_a_worker_that_was_forked_since(tmp_path: Path) -> None:
    """Connections and groups cannot be destroyed in a process that has none of their threads."""
    found_in = tmp_path / "found"
    gc.disable()
    try:
        Cycle(found_in)
        loader = Loader(Collecting(4), 2, num_workers=1, multiprocessing_context="fork", persistent_workers=False)
        assert len(list(loader)) == 2
        assert not found_in.exists()
    finally:
        gc.enable()
    gc.collect()
    assert found_in.read_text() == str(os.getpid())


def test_loader_that_is_closed_lets_workers_finish_and_keeps_what_they_printed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    loader = Loader(Talking(6), 2, num_workers=1, persistent_workers=False)
    assert [plain(batch) for batch in loader] == [[0, 1], [2, 3], [4, 5]]  # prefetch is only a hint
    assert loader.worker_pids == []
    said = capfd.readouterr()
    assert [f"reads {number}" in said.out for number in range(6)] == [True] * 6
    assert "prefetch fails" in said.out


def is_shared(samples: list[torch.Tensor]) -> bool:
    return torch.utils.data.default_collate(samples).is_shared()


def test_worker_collates_in_memory_of_its_own_so_that_a_killed_one_leaves_no_name_in_dev_shm() -> None:
    with contextlib.closing(
        Loader(list(torch.arange(4.0)), batch_size=2, num_workers=1, collate_fn=is_shared)
    ) as loader:
        assert list(loader) == [False, False]
