"""The vault of a torchrun node: who gets a place, and when."""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from p2pstate.agent.companion import Settings, VaultKeeper, create
from p2pstate.agent.rounds import decide_restart
from p2pstate.types import Start
from rendezvous.config import Config
from rendezvous.types import Member, View


class FakeNode:
    def __init__(self, member: Member) -> None:
        self.key = member.key
        self.verdict = None
        self.proposed: list[str] = []
        self.readers: dict[int, Callable[[], None]] = {}
        self.later: list[Callable[[], None]] = []

    def propose(self, reason: str) -> None:
        self.proposed.append(reason)

    def add_reader(self, fd: int, callback: Callable[[], None]) -> None:
        self.readers[fd] = callback

    def remove_reader(self, fd: int) -> None:
        del self.readers[fd]

    def poll(self) -> list[tuple[int, int]]:
        """What is readable of the readers."""
        poller = select.poll()
        for fd in self.readers:
            poller.register(fd, select.POLLIN)
        return poller.poll(10_000)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        self.later.append(callback)


class Host:
    """One node `a` of `nnodes`; `told` is what its workers hear, by their channel (any object)."""

    def __init__(self, nnodes: tuple[int, int]) -> None:
        self.member = Member("a", 1, "127.0.0.1:1", num_workers=1)
        self.node: Any = FakeNode(self.member)
        low, high = nnodes
        self.config = Config(
            run_id="run",
            name="a",
            bind="127.0.0.1:0",
            contacts=(),
            num_workers=1,
            num_nodes_min=low,
            num_nodes_max=high,
        )
        self.address = "agent"
        self.told: list[tuple[Any, dict[str, Any]]] = []

    def tell(self, channel: Any, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        self.told.append((channel, message))

    def say(self, sentence: str) -> None: ...

    def view(self, round_: int, start: str = Start.FRESH) -> View:
        return View("nonce", round_, round_, (self.member,), (), (), "because", {"start": start, "step": 3})


@pytest.fixture
def host() -> Host:
    return Host((1, 1))


@pytest.fixture
def keeper(host: Host):
    keeper = VaultKeeper(host, Settings(hang_floor_s=0))
    yield keeper
    keeper.close()


@pytest.fixture
def process():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as running:
        yield running
        running.kill()


def worker(pid: int, round_: int, **changed: int) -> dict[str, Any]:
    return {"t": "worker", "pid": pid, "round": round_, "rank": 0, "num_local": 1, "world_size": 1, **changed}


def test_worker_gets_its_place_when_its_round_has_come(host: Host, keeper: VaultKeeper, process: Any) -> None:
    keeper.on_view(host.view(1))
    keeper.on_message("early", worker(process.pid, 2))
    assert host.told == []
    keeper.on_view(host.view(2, Start.RESTART))
    (channel, message), *_ = host.told
    assert (channel, message["t"], message["rank"], message["fresh"], message["restore"]) == (
        "early",
        "assign",
        0,
        True,
        True,
    )


def test_rank_goes_to_a_new_process_only_after_the_one_before_has_ended(
    host: Host, keeper: VaultKeeper, process: Any
) -> None:
    keeper.on_view(host.view(1))
    keeper.on_message("old", worker(process.pid, 1))
    keeper.on_closed("old")  # it closed its line, and lives on
    host.told.clear()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as successor:
        keeper.on_message("new", worker(successor.pid, 1))
        assert host.told == []
        assert process.wait(10) == -9
        ((fd, _),) = host.node.poll()
        host.node.readers[fd]()
        assert [(channel, message["t"]) for channel, message in host.told] == [("new", "assign")]
        successor.kill()


@pytest.mark.parametrize(
    ("nnodes", "changed", "words"),
    [((1, 2), {}, "--nnodes 1:2"), ((1, 1), {"world_size": 3, "num_local": 2}, "--nproc-per-node")],
)
def test_run_that_cannot_be_protected_is_refused_with_the_reason(
    nnodes: tuple[int, int], changed: dict[str, int], words: str, process: Any
) -> None:
    host = Host(nnodes)
    keeper = VaultKeeper(host, Settings(hang_floor_s=0))
    keeper.on_view(host.view(1))
    keeper.on_message("w", worker(process.pid, 1, **changed))
    keeper.close()
    ((_, message),) = host.told
    assert message["t"] == "refused"
    assert words in message["reason"]


def test_error_that_nobody_explains_asks_for_a_new_round(host: Host, keeper: VaultKeeper, process: Any) -> None:
    keeper.on_view(host.view(1))
    keeper.on_message("w", worker(process.pid, 1))
    keeper.on_message("w", {"t": "error", "epoch": 1, "text": "gloo broke"})
    assert host.node.proposed == []
    host.node.later.pop()()
    assert host.node.proposed == ["a: rank 0: gloo broke"]
    assert keeper.ballot()["wants_round"]
    keeper.on_view(host.view(2))
    assert not keeper.ballot()["wants_round"]


def test_message_of_a_stranger_is_an_error(keeper: VaultKeeper) -> None:
    with pytest.raises(KeyError):
        keeper.on_message("stranger", {"t": "inventory", "id": 1})


def test_every_round_after_the_first_resumes_where_somebody_has_state(host: Host) -> None:
    first = decide_restart(None, [{"has_state": False}])
    assert first == (False, {"start": Start.FRESH, "since": 0, "step": -1, "ends": [0, 0, [], [], []]})
    wanted, data = decide_restart(host.view(1), [{"has_state": True, "step": 4}, {"wants_round": "x"}])
    assert (wanted, data) == (True, {"start": Start.RESTART, "since": 0, "step": 4, "ends": [0, 0, [], [], []]})


def test_new_start_voids_what_was_known_before_also_from_those_who_have_not_heard_of_it(host: Host) -> None:
    wanted, data = decide_restart(
        host.view(1), [{"start_over": Start.FRESH, "wants_round": "x", "step": 7, "ends": [1, 1, [5], [], []]}]
    )
    assert (wanted, data) == (True, {"start": Start.FRESH, "since": 2, "step": -1, "ends": [2, 0, [], [], []]})
    fresh = View("nonce", 2, 2, (host.member,), (), (), "because", data)
    _, data = decide_restart(fresh, [{"step": 7}, {"since": 2, "step": 0}])
    assert (data["since"], data["step"]) == (3, -1)  # nothing to resume: anew once more
    told = [
        {"step": 7, "ends": [1, 1, [5], [], []]},
        {"since": 2, "step": 3, "ends": [2, 1, [3], [3], []]},
        {"ends": "nonsense"},
    ]
    _, data = decide_restart(fresh, told)
    assert data == {"start": Start.RESTART, "since": 2, "step": 3, "ends": [2, 1, [3], [3], []]}


def test_status_tells_of_ranks_and_what_they_committed(host: Host, keeper: VaultKeeper, process: Any) -> None:
    assert keeper.status()["ranks"] == []
    keeper.on_view(host.view(1))
    keeper.on_message("w", worker(process.pid, 1))
    keeper.on_message("w", {"t": "in_loop"})
    keeper.on_message("w", {"t": "step", "step": 7, "protected": 6})
    (rank,) = keeper.status()["ranks"]
    assert (rank["rank"], rank["pid"], rank["phase"], rank["step"], rank["protected"]) == (0, process.pid, "loop", 7, 6)


@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan"])
def test_bad_hang_floor_names_the_variable(text: str) -> None:
    assert Settings.from_env({}).hang_floor_s > 0
    assert Settings.from_env({"P2PSTATE_HANG_FLOOR": "0"}).hang_floor_s == 0
    with pytest.raises(ValueError, match="P2PSTATE_HANG_FLOOR"):
        Settings.from_env({"P2PSTATE_HANG_FLOOR": text})


def test_page_of_a_torchrun_node_is_set_by_variables(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("sesame\n")
    settings = Settings.from_env({"P2PSTATE_HTTP": "127.0.0.1:0", "P2PSTATE_HTTP_TOKEN_FILE": str(token_file)})
    assert (settings.http, settings.http_token, settings.otel) == ("127.0.0.1:0", "sesame", False)
    assert Settings.from_env({"P2PSTATE_OTEL": "1"}).otel
    token_file.write_text("")
    with pytest.raises(ValueError, match="is empty"):
        Settings.from_env({"P2PSTATE_HTTP_TOKEN_FILE": str(token_file)})


def test_page_that_cannot_be_served_costs_the_page_and_not_the_vault(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(host, "say", said.append)
    monkeypatch.setenv("P2PSTATE_HTTP", "nowhere")
    create(host).close()
    assert "nothing is shown of this node: 'nowhere' is no HOST:PORT" in said[0]
