"""p2pstate.operator.worker: what happens to a Run is looked at soon; a look that fails holds up no other Run."""

from __future__ import annotations

import queue
import threading

import pytest

from p2pstate.operator import worker as worker_module
from p2pstate.operator.cluster import ApiError
from p2pstate.operator.worker import Key, Worker

A, B = ("default", "a"), ("default", "b")
WITHIN_S = 30.0


class Looks:
    """Looks as they come; those at ``failing`` Runs fail."""

    def __init__(self, *names: Key, failing: Key | None = None, error: Exception | None = None) -> None:
        self.seen: queue.Queue[Key] = queue.Queue()
        self.threads: set[str] = set()
        self._failing, self._error = failing, error
        self.worker = Worker(self._look, lambda: names)
        self.worker.start()

    def _look(self, key: Key) -> None:
        self.threads.add(threading.current_thread().name)
        self.seen.put(key)
        if key == self._failing and self._error is not None:
            raise self._error

    def __enter__(self) -> Looks:
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.close(WITHIN_S)


def test_every_run_is_looked_at_in_the_beginning_and_one_again_when_something_happens() -> None:
    with Looks(A, B) as looks:
        assert {looks.seen.get(timeout=WITHIN_S) for _ in range(2)} == {A, B}
        looks.worker.happened(B)
        assert looks.seen.get(timeout=WITHIN_S) == B
        assert looks.threads == {"p2pstate-operator"}


def test_many_happenings_are_few_looks() -> None:
    with Looks(A) as looks:
        assert looks.seen.get(timeout=WITHIN_S) == A
        for _ in range(1000):
            looks.worker.happened(A)
        assert looks.seen.get(timeout=WITHIN_S) == A
    assert looks.seen.qsize() < 100


@pytest.mark.parametrize("error", [ApiError(500, "no"), ZeroDivisionError()])
def test_look_that_fails_is_put_off_and_others_go_on(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    with Looks(A, B, failing=A, error=error) as looks:
        assert {looks.seen.get(timeout=WITHIN_S) for _ in range(2)} == {A, B}
        looks.worker.happened(A)  # its back-off counts
        for _ in range(2):
            looks.worker.happened(B)
            assert looks.seen.get(timeout=WITHIN_S) == B
    assert "Run default/a" in caplog.text
    assert "again in 10 s" in caplog.text


@pytest.mark.parametrize("error", [ApiError(429, "too many requests"), KeyError("items")])
def test_list_of_runs_that_fails_does_not_end_looking(
    error: Exception, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "AGAIN_S", 0.05)
    answers = iter([error])
    seen: queue.Queue[Key] = queue.Queue()

    def names() -> list[Key]:
        for each in answers:
            raise each
        return [A]

    worker = Worker(seen.put, names)
    worker.start()
    assert seen.get(timeout=WITHIN_S) == A
    worker.close(WITHIN_S)
    assert "the list of Runs" in caplog.text
