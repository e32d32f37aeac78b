"""A file at its source as it is in the world: servers that stumble, hang, know no ranges, and name versions anyhow."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from fsspec import AbstractFileSystem
from fsspec.registry import register_implementation

from p2pstate.data import DataChanged
from p2pstate.data.remote import NUM_TRIES, Remote

CONTENT = bytes(range(200))


class StatusError(Exception):
    """As aiohttp's: no OSError."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class World(AbstractFileSystem):
    """One file. ``answers`` are made before the usual one, one for each request."""

    protocol = "world"
    cachable = False
    about: dict[str, Any] = {}  # noqa: RUF012
    answers: list[Callable[[], Any]] = []  # noqa: RUF012

    def info(self, path: str, **kwargs: Any) -> Any:
        try:
            if self.answers:
                self.answers.pop(0)()
        except StatusError as error:
            raise FileNotFoundError(path) from error  # as fsspec does of HTTP
        return {"name": path, "size": len(CONTENT), "type": "file", **self.about}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> Any:
        return self.answers.pop(0)() if self.answers else CONTENT[start:end]


register_implementation("world", World)


@pytest.fixture(autouse=True)
def remote(monkeypatch: pytest.MonkeyPatch) -> Remote:
    monkeypatch.setattr("p2pstate.data.remote.FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(World, "about", {})
    monkeypatch.setattr(World, "answers", [])
    return Remote("world://file", {}, 30.0)


def fails(error: BaseException) -> Callable[[], Any]:
    def answer() -> Any:
        raise error

    return answer


@pytest.mark.parametrize("key", ["ETag", "Last-Modified", "LastModified", "updated", "generation", "mtime"])
def test_version_is_known_by_whatever_its_file_system_says_of_it(remote: Remote, key: str) -> None:
    World.about = {key: "monday"}
    before = remote.identity()
    assert remote.identity() == before
    World.about = {key: "tuesday"}
    assert remote.identity() != before


@pytest.mark.parametrize("status", [500, 503, 429])
def test_request_that_a_busy_server_refuses_is_made_again(remote: Remote, status: int) -> None:
    World.answers = [fails(StatusError(status))] * 2
    assert remote.identity().num_bytes == len(CONTENT)
    World.answers = [fails(StatusError(status)), fails(ConnectionResetError())]
    assert remote.read(3, 7) == CONTENT[3:7]


def test_file_that_cannot_be_reached_is_not_said_to_be_missing(remote: Remote) -> None:
    World.answers = [fails(StatusError(503))] * NUM_TRIES
    with pytest.raises(OSError, match="world://file cannot be reached: status 503") as caught:
        remote.identity()
    assert not isinstance(caught.value, FileNotFoundError)
    assert not World.answers


@pytest.mark.parametrize(
    "error", [StatusError(404), StatusError(403), PermissionError("no"), ValueError("a wrong call")]
)
def test_request_that_will_never_succeed_is_made_once(remote: Remote, error: Exception) -> None:
    World.answers = [fails(error), fails(AssertionError("asked again"))]
    with pytest.raises(type(error)):
        remote.read(0, 5)


def test_server_that_knows_no_ranges_sends_the_right_bytes_all_the_same(remote: Remote) -> None:
    World.answers = [lambda: CONTENT]
    assert remote.read(50, 60) == CONTENT[50:60]


def test_answer_that_was_cut_short_is_asked_for_again_and_then_taken_for_another_file(remote: Remote) -> None:
    World.answers = [lambda: CONTENT[:2]]
    assert remote.read(0, 9) == CONTENT[:9]
    World.answers = [lambda: CONTENT[:2]] * NUM_TRIES
    with pytest.raises(DataChanged, match="2 bytes came instead of 9 at 0: the file was replaced"):
        remote.read(0, 9)


def test_request_that_hangs_is_made_once_more() -> None:
    over = threading.Event()
    remote = Remote("world://file", {}, 0.2)
    World.answers = [over.wait]
    assert remote.read(0, 9) == CONTENT[:9]
    World.answers = [over.wait] * 3
    with pytest.raises(TimeoutError, match=r"an attempt to read it did not end within 0\.2 s"):
        remote.read(0, 9)
    assert len(World.answers) == 1
    over.set()
