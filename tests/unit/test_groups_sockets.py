"""groups/sockets.py and inner.py: the connections of a group, found, cut and not inherited. With gloo in processes."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from groups_in_processes import DEADLINE_S, end_all, registry_of, run_alone, run_ranks, start_ranks
from torch.distributed import FileStore

from p2pstate.errors import Retryable
from p2pstate.groups.inner import Inner, build_inner
from p2pstate.groups.sockets import Connections
from p2pstate.groups.status import Status

GROUP_TIMEOUT = timedelta(seconds=60)
FREED_WITHIN_S = 5.0  # the group's own timeout would take twelve times as long


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def connect(server: socket.socket) -> tuple[socket.socket, socket.socket]:
    """Both ends of a new connection."""
    ours = socket.create_connection(server.getsockname())
    theirs, _ = server.accept()
    ours.settimeout(DEADLINE_S)
    theirs.settimeout(DEADLINE_S)
    return ours, theirs


def works(pair: tuple[socket.socket, socket.socket]) -> bool:
    """Whether bytes go over this connection."""
    try:
        pair[0].sendall(b"x")
        return pair[1].recv(1) == b"x"
    except OSError:
        return False


def close(*pairs: tuple[socket.socket, socket.socket]) -> None:
    for pair in pairs:
        for each in pair:
            each.close()


def test_connections_are_exactly_the_tcp_sockets_opened_inside(listener: socket.socket) -> None:
    before = connect(listener)
    connections = Connections()
    with connections:
        inside = connect(listener)
        unix = socket.socketpair()
    after = connect(listener)
    assert len(connections) == 2
    connections.cut()
    assert not works(inside)
    assert all(works(pair) for pair in (before, unix, after))
    close(before, inside, unix, after)


def test_connections_cut_leaves_a_listening_socket_alone(listener: socket.socket) -> None:
    connections = Connections()
    with connections:
        other = socket.create_server(("127.0.0.1", 0))
    connections.cut()
    pair = connect(other)
    assert works(pair)
    close(pair)
    other.close()


def test_connections_cut_frees_a_blocked_receiver(listener: socket.socket) -> None:
    connections = Connections()
    with connections:
        pair = connect(listener)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(pair[1].recv(1)))
    reader.start()
    connections.cut()
    reader.join(DEADLINE_S)
    assert received == [b""]
    close(pair)


def test_connections_cut_does_not_touch_a_descriptor_that_was_given_to_another_socket(listener: socket.socket) -> None:
    connections = Connections()
    with connections:
        first = connect(listener)
    numbers = [each.fileno() for each in first]
    close(first)
    second = connect(listener)
    assert [each.fileno() for each in second] == numbers, "the descriptors were not used again: nothing is tested"
    connections.cut()
    connections.close_in_child()
    assert works(second)
    close(second)


def test_connections_cut_twice_is_cut_once(listener: socket.socket) -> None:
    connections = Connections()
    with connections:
        pair = connect(listener)
    connections.cut()
    connections.cut()
    assert not works(pair)
    close(pair)


def test_connections_cut_while_they_are_made_reaches_those_made_before_and_after(listener: socket.socket) -> None:
    connections = Connections()
    with connections:
        first = connect(listener)
        connections.cut()
        assert not works(first)
        second = connect(listener)
    assert not works(second)
    close(first, second)


def test_connections_cut_before_they_are_made_are_refused() -> None:
    connections = Connections()
    connections.cut()
    with pytest.raises(Retryable), connections:
        raise AssertionError("connecting was begun although the round is over")


def test_connections_that_were_left_behind_do_not_take_later_ones_with_them(listener: socket.socket) -> None:
    """A thread that was given up is still inside its constructor when the next round connects."""
    old, new = Connections(), Connections()
    with old:
        theirs = connect(listener)
        old.cut()
        with new:
            ours = connect(listener)
    later = connect(listener)
    old.cut()
    assert not works(theirs)
    assert works(ours)
    assert works(later)
    assert len(new) == 2
    close(theirs, ours, later)


def test_connections_are_closed_on_exec(listener: socket.socket) -> None:
    connections = Connections()
    with connections:
        pair = connect(listener)
        for each in pair:
            each.set_inheritable(True)
    assert all(fcntl.fcntl(each, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for each in pair)
    close(pair)


# -- gloo

kept: list[Inner] = []  # the destructor of a group with an operation in flight waits for the group's timeout


def inner_of(rank: int, num_ranks: int, folder: str) -> tuple[Inner, Connections]:
    connections = Connections()
    store = FileStore(f"{folder}/store", num_ranks)
    kept.append(build_inner(store, rank, num_ranks, "127.0.0.1", 1, GROUP_TIMEOUT, connections))
    return kept[-1], connections


def tcp_sockets() -> set[str]:
    names = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            names.add(os.readlink(f"/proc/self/fd/{entry}"))
        except OSError:
            continue
    inodes = {line.split()[9] for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]}
    return {name for name in names if name.startswith("socket:") and name[8:-1] in inodes}


def finds(_line: Any, rank: int, num_ranks: int, folder: str) -> dict[str, Any]:
    before = tcp_sockets()
    _inner, connections = inner_of(rank, num_ranks, folder)
    opened = tcp_sockets() - before
    listing = subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, text=True, check=True)
    return {
        "found": len(connections),
        "opened": len(opened),
        "inherited": [name for name in opened if name in listing.stdout],
    }


def test_gloo_group_has_its_sockets_found_and_inherited_by_no_program(tmp_path: Path) -> None:
    for found in run_ranks(finds, tmp_path, 3):
        assert found["opened"] >= 3  # two peers and a listener
        assert found["found"] == found["opened"]
        assert found["inherited"] == []


def all_reduce_with_a_silent_peer(line: Any, rank: int, num_ranks: int, folder: str) -> Any:
    """Rank 2 lives and says nothing; the others cut their own connections while they are blocked."""
    inner, _ = inner_of(rank, num_ranks, folder)
    if rank == 2:
        return line.recv()
    threading.Timer(0.2, inner.cut).start()
    began = time.monotonic()
    try:
        inner.group.allreduce([torch.ones(1 << 16)]).wait()
    except RuntimeError:
        return time.monotonic() - began
    return "the operation ended well without rank 2"


def test_gloo_operation_blocked_on_a_live_silent_peer_is_freed_by_a_cut(tmp_path: Path) -> None:
    children = start_ranks(all_reduce_with_a_silent_peer, tmp_path, 3)
    try:
        for child in children[:2]:
            seconds = child.result()
            assert isinstance(seconds, float), seconds
            assert seconds < FREED_WITHIN_S
        children[2].say("enough")
        assert children[2].result() == "enough"
    finally:
        end_all(children)


def receive_from_a_silent_peer(line: Any, rank: int, num_ranks: int, folder: str) -> Any:
    inner, _ = inner_of(rank, num_ranks, folder)
    if rank == 1:
        return line.recv()
    threading.Timer(0.2, inner.cut).start()
    began = time.monotonic()
    try:
        inner.group.recv([torch.ones(4)], 1, 0).wait()
    except RuntimeError:
        return time.monotonic() - began
    return "a receive ended well without a sender"


def test_gloo_receive_blocked_on_a_live_silent_peer_is_freed_by_a_cut(tmp_path: Path) -> None:
    children = start_ranks(receive_from_a_silent_peer, tmp_path, 2)
    try:
        seconds = children[0].result()
        assert isinstance(seconds, float), seconds
        assert seconds < FREED_WITHIN_S
        children[1].say("enough")
        children[1].result()
    finally:
        end_all(children)


def dies_and_leaves_a_child(line: Any, rank: int, num_ranks: int, folder: str) -> Any:
    """Rank 1 forks a child that lives on, as a loader's worker does, and is gone."""
    inner, _ = inner_of(rank, num_ranks, folder)
    if rank == 1:
        read, _write = os.pipe()
        child = os.fork()
        if child == 0:
            os.read(read, 1)  # for ever: it holds the other end itself
            os._exit(0)
        line.send(child)
        os._exit(1)
    line.send("connected")
    began = time.monotonic()
    try:
        inner.group.allreduce([torch.ones(1 << 16)]).wait()
    except RuntimeError:
        return time.monotonic() - began
    return "the operation ended well without rank 1"


def test_gloo_group_of_a_dead_process_is_not_kept_open_by_its_forked_child(tmp_path: Path) -> None:
    children = start_ranks(dies_and_leaves_a_child, tmp_path, 2)
    orphan = 0
    try:
        assert children[0].hear() == "connected"
        orphan = children[1].hear()
        seconds = children[0].result()
        assert isinstance(seconds, float), seconds
        assert seconds < FREED_WITHIN_S
        os.kill(orphan, 0)  # it did live on
    finally:
        if orphan:
            os.kill(orphan, 9)
        end_all(children)


def build_after_cut(folder: str) -> str:
    status = Status()
    status.connect(1)
    registry = registry_of(0, 1, folder, status)
    registry.cut(1)
    try:
        registry.build(1, own_only=True)
    except Retryable as error:
        return str(error)
    return "connected"


def test_registry_round_that_was_cut_before_it_was_built_is_refused_at_once(tmp_path: Path) -> None:
    assert "over" in run_alone(build_after_cut, str(tmp_path))
