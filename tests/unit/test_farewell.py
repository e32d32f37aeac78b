"""Signals to a worker in its loop: noticed at once, left to the script where it handles them."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from p2pstate.worker import farewell as farewell_module
from p2pstate.worker.farewell import Farewell

WITHIN_S = 20.0


@pytest.fixture
def late() -> list[str]:
    return []


@pytest.fixture
def farewell(late: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Farewell]:
    monkeypatch.setattr(farewell_module, "GRACE_S", 0.05)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGINT)}
    each = Farewell(late.append)
    yield each
    each.close()
    for number, handler in before.items():
        signal.signal(number, handler)


def wait_until(true: object) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_gives_the_reason_and_a_call_when_time_is_up(number: int, farewell: Farewell, late: list[str]) -> None:
    farewell.listen()
    os.kill(os.getpid(), number)
    wait_until(lambda: late)
    assert late == [farewell.reason] == [f"{signal.Signals(number).name} was sent to it"]


@pytest.mark.parametrize("first", ["signal", "wait"])
def test_worker_that_waits_for_a_round_leaves_at_once(
    first: str, farewell: Farewell, late: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(farewell_module, "GRACE_S", 1000.0)
    farewell.listen()
    if first == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: farewell.reason)
        assert late == []
    with farewell.idle():
        if first == "wait":
            os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: late)


def test_signal_is_noticed_while_the_training_thread_is_blocked_in_c(farewell: Farewell) -> None:
    blocked = False
    seen = []
    farewell._on_late = lambda reason: seen.append(blocked)
    farewell.listen()
    threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGTERM)).start()
    blocked = True
    hashlib.pbkdf2_hmac("sha256", b"", b"", 3_000_000)  # about a second, without a look at signals
    blocked = False
    assert seen == [True]


def test_handler_of_the_script_stays(farewell: Farewell) -> None:
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    farewell.listen()
    os.kill(os.getpid(), signal.SIGTERM)
    wait_until(lambda: seen)
    time.sleep(0.05)
    assert farewell.reason == ""


def test_closed_farewell_has_given_everything_back(farewell: Farewell) -> None:
    farewell.listen()
    farewell.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1
    wait_until(lambda: not any(thread.name == "p2pstate-signals" for thread in threading.enumerate()))


def test_signal_to_a_forked_child_ends_the_child_alone(farewell: Farewell) -> None:
    farewell.listen()
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write_end, b"x")
            time.sleep(WITHIN_S)
        finally:
            os._exit(1)
    assert os.read(read_end, 1) == b"x"
    os.close(read_end)
    os.close(write_end)
    os.kill(pid, signal.SIGTERM)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status)
    time.sleep(0.05)
    assert farewell.reason == ""
