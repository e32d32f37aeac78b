"""groups/waiting.py: what a wait returns, raises, and gives up on."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta

import pytest

from p2pstate.groups import waiting
from p2pstate.groups.waiting import Abandoned, call, wait_collective

LONG = timedelta(minutes=10)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "POLL_S", 0.001)
    monkeypatch.setattr(waiting, "ABANDON_AFTER_S", 0.0)


def never() -> bool:
    return False


def always() -> bool:
    return True


@pytest.fixture
def blocked() -> Iterator[threading.Event]:
    """An event that a test's function may wait on; set at the test's end, so that no thread is left."""
    event = threading.Event()
    yield event
    event.set()


def test_call_returns_what_the_function_returns() -> None:
    assert call(lambda: 7, never, "counting") == 7


def test_call_runs_on_another_thread_with_a_name() -> None:
    name = call(lambda: threading.current_thread().name, never, "counting")
    assert name == "p2pstate-counting"


def test_call_after_call_uses_the_same_thread() -> None:
    assert len({call(threading.get_ident, never, "counting") for _ in range(20)}) <= 2


def test_call_that_has_ended_keeps_nothing_alive() -> None:
    class Thing:
        pass

    thing = Thing()
    gone = weakref.ref(thing)
    call(lambda kept=thing: None, never, "keeping")  # type: ignore[misc]
    del thing
    for _ in range(1000):
        if gone() is None:
            break
        time.sleep(0.005)
    assert gone() is None


def test_call_in_a_forked_child_has_threads_of_its_own() -> None:
    call(lambda: None, never, "before")
    pid = os.fork()
    if pid == 0:
        os._exit(call(lambda: 7, never, "child"))
    deadline = time.monotonic() + 30.0
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.005)
    if ended == (0, 0):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        pytest.fail("the child waits for a thread that it does not have")
    assert os.waitstatus_to_exitcode(ended[1]) == 7


class Oops(BaseException):
    pass


@pytest.mark.parametrize("error", [RuntimeError("closed"), ValueError("sizes"), Oops("not even an Exception")])
def test_call_raises_what_the_function_raises(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        call(fail, never, "failing")
    assert raised.value is error


def test_call_of_a_function_that_blocks_is_given_up_once_the_round_is_over(blocked: threading.Event) -> None:
    over = threading.Event()

    def is_over() -> bool:
        asked.append(over.is_set())
        if len(asked) == 3:
            over.set()
        return asked[-1]

    asked: list[bool] = []
    with pytest.raises(Abandoned, match="connecting was given up"):
        call(blocked.wait, is_over, "connecting")
    assert asked[:3] == [False, False, False], "given up before the round was over"


def test_call_of_a_function_that_ends_soon_after_the_round_has_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "ABANDON_AFTER_S", 600.0)
    over = threading.Event()

    def is_over() -> bool:
        over.set()
        return True

    assert call(lambda: over.wait(60.0), is_over, "finishing")


FAR_TOO_MANY = 500_000


class FakeWork:
    """A gloo handle: ``num_slices`` waits run into their timeout, then it is completed, with ``error`` or without."""

    def __init__(self, num_slices: int, error: Exception | None = None, *, completes_in_slice: bool = False) -> None:
        self.num_slices, self.error, self.completes_in_slice = num_slices, error, completes_in_slice
        self.waits: list[timedelta | None] = []

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.waits.append(timeout)
        assert len(self.waits) < FAR_TOO_MANY, "it waits for ever"
        if len(self.waits) <= self.num_slices:
            assert timeout is not None, "a wait without end for an operation that has not ended"
            raise RuntimeError("Timed out waiting for recv operation to complete")
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return len(self.waits) >= self.num_slices + (not self.completes_in_slice)


ENDLESS = 1 << 60


@pytest.mark.parametrize("num_slices", [0, 1, 5])
def test_wait_collective_for_an_operation_that_ends_well_returns(num_slices: int) -> None:
    work = FakeWork(num_slices)
    wait_collective(work, never)
    assert len(work.waits) == num_slices + 1
    assert all(each is not None and timedelta(0) < each <= timedelta(seconds=waiting.POLL_S) for each in work.waits)


@pytest.mark.parametrize("num_slices", [0, 3])
@pytest.mark.parametrize("error", [RuntimeError("Connection closed by peer"), ValueError("destroyed")])
def test_wait_collective_for_an_operation_that_fails_raises_its_error(num_slices: int, error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        wait_collective(FakeWork(num_slices, error), never)
    assert raised.value is error


def test_wait_collective_for_an_operation_that_completes_at_a_slices_end_returns() -> None:
    work = FakeWork(1, completes_in_slice=True)
    wait_collective(work, never)
    assert work.waits[-1] is None  # asked once more: the operation had ended, the slice's timeout was not its error


def test_wait_collective_for_an_operation_that_fails_at_a_slices_end_raises_its_error() -> None:
    error = RuntimeError("Connection closed by peer")
    with pytest.raises(RuntimeError, match="closed by peer"):
        wait_collective(FakeWork(1, error, completes_in_slice=True), never)


def test_wait_collective_for_an_operation_without_end_is_given_up_once_the_round_is_over() -> None:
    work = FakeWork(ENDLESS)
    with pytest.raises(Abandoned):
        wait_collective(work, lambda: len(work.waits) >= 4)
    assert len(work.waits) >= 4


def test_wait_collective_when_the_round_is_over_still_returns_what_has_ended() -> None:
    wait_collective(FakeWork(0), always)


@pytest.mark.parametrize("timeout", [timedelta(0), timedelta(microseconds=1), timedelta(milliseconds=5)])
def test_wait_collective_past_its_timeout_raises_the_timeout(timeout: timedelta) -> None:
    with pytest.raises(RuntimeError, match="Timed out"):
        wait_collective(FakeWork(ENDLESS), never, timeout)


@pytest.mark.parametrize("timeout", [timedelta(0), LONG])
def test_wait_collective_for_an_operation_that_has_ended_needs_no_time(timeout: timedelta) -> None:
    wait_collective(FakeWork(0), never, timeout)


def test_wait_collective_with_a_timeout_never_waits_longer_than_a_slice_at_once() -> None:
    work = FakeWork(2)
    wait_collective(work, never, LONG)
    assert all(each is not None and each <= timedelta(seconds=waiting.POLL_S) for each in work.waits)
