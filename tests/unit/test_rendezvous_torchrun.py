"""What torchrun tells its p2p backend, and ranks that are dealt out while a round ends. No process is started."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from rendezvous.autoload import ENV_AGENT, ENV_LAUNCHER, autoload
from rendezvous.keys import make_key_file
from rendezvous.store import StoreEnded, StoreError, worker_store
from rendezvous.torchrun import AgentStore, P2PHandler, create, creator
from rendezvous.torchrun_settings import Settings, read_settings


def settings(endpoint: str = "h1:7000,h2", low: int = 2, high: int = 3, **options: Any) -> Settings:
    env = options.pop("env", {})
    return read_settings(RendezvousParameters("p2p", endpoint, "run", low, high, **options), env)


def test_endpoint_lists_contacts_with_torchruns_port_where_none_is_given() -> None:
    env = {"P2PSTATE_CONTACTS": "dir:/shared,h2:29400"}
    assert settings("h1:7000, h2,[::1]", env=env).config.contacts == (
        "h1:7000",
        "h2:29400",
        "[::1]:29400",
        "dir:/shared",
    )


def test_options_of_rdzv_conf_reach_the_configuration(tmp_path: Path) -> None:
    make_key_file(str(tmp_path / "run.key"))
    found = settings(
        join_timeout="7",
        last_call_timeout="1.5",
        spares="1",
        witnesses="1",
        bind="10.0.0.1:7000",
        name="node7",
        key_file=str(tmp_path / "run.key"),
        preset="local",
        insecure="true",
        rank="0",  # accelerate passes it
    )
    config = found.config
    assert (config.num_nodes_min, config.num_nodes_max, config.max_size) == (2, 3, 5)
    assert (config.name, config.bind, found.binds) == ("node7", "10.0.0.1:7000", ("10.0.0.1:7000",))
    assert (found.join_timeout_s, config.first_view_last_call_s, config.insecure) == (7.0, 1.5, True)
    assert config.key is not None
    assert config.failure_s < 2.0


@pytest.mark.parametrize(
    ("endpoint", "options", "text"),
    [
        ("", {}, "--rdzv-endpoint is missing"),
        ("h1", {"spars": "1"}, "knows no spars"),
        ("h1", {"timeout": "soon"}, "timeout=soon: not a number"),
        ("h1", {"spares": "-1"}, "must be at least 0"),
        ("h1", {"timeout": "inf"}, "below 1e9"),
        ("h1", {"preset": "fast"}, "preset must be one of"),
        ("h1", {"bind": "here"}, "bind 'here' is not"),
    ],
)
def test_parameters_that_cannot_work_are_refused_by_name(endpoint: str, options: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        settings(endpoint, **options)


def test_single_node_needs_no_endpoint() -> None:
    assert settings("", 1, 1).config.contacts == ()


def test_handler_is_the_one_torchrun_asks_for_and_starts_nothing_by_itself() -> None:
    assert creator() is create
    handler = create(RendezvousParameters("p2p", "h1", "run", 1, 2))
    assert isinstance(handler, P2PHandler)
    assert (handler.get_backend(), handler.get_run_id(), handler.use_agent_store) == ("p2p", "run", False)
    assert handler.num_nodes_waiting() == 0
    assert not handler.is_closed()
    assert handler.shutdown()


class EndedChannel:
    """A round that is over for everything but the keys in `alive`."""

    def __init__(self, alive: str = "") -> None:
        self._alive = alive

    def request(self, epoch: int, op: str, args: list[Any], deadline_s: float) -> Any:
        if self._alive and self._alive in str(args[0]):
            return None
        raise StoreEnded("over")


def agent_store(alive: str = "") -> AgentStore:
    return AgentStore(EndedChannel(alive), 1, timedelta(seconds=1), 3)


@pytest.mark.parametrize("alive", ["", "role_info"])
def test_round_that_ends_while_ranks_are_dealt_out_gives_ranks_as_if_all_nodes_were_alike(alive: str) -> None:
    store = agent_store(alive)
    role = json.dumps({"role": "default", "rank": 1, "local_world_size": 2})
    store.set("torchelastic/role_info/1", role)
    store.multi_set(["torchelastic/assigned_ranks/0"], ["x"])
    assert json.loads(store.get("torchelastic/assigned_ranks/1")) == [2, 6, 2, 6]
    if not alive:
        assert store.multi_get([f"torchelastic/role_info/{i}" for i in range(3)]) == [role.encode()] * 3


def test_round_that_ends_is_an_error_for_every_other_key() -> None:
    store = agent_store()
    for call in (lambda: store.get("other"), lambda: store.set("other", "x"), lambda: store.wait(["other"])):
        with pytest.raises(StoreEnded):
            call()


def test_autoload_warns_and_never_raises(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(ENV_AGENT, "nobody")
    monkeypatch.setenv(ENV_LAUNCHER, "no number")
    autoload()
    assert "will make a TCPStore" in capsys.readouterr().err


def test_autoload_elsewhere_leaves_torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    before = dict(handlers)
    monkeypatch.delenv(ENV_AGENT, raising=False)
    autoload()
    assert handlers == before


def test_worker_store_of_an_agent_that_is_gone_says_so() -> None:
    with pytest.raises(StoreError, match="agent is gone"):
        worker_store("p2pstate-nobody", 1, "init0", None)
