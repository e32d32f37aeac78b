"""Settings: what is refused and in which words, the ladder of timeouts, what the environment adds."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from rendezvous.config import PRESETS, Config, Timing
from rendezvous.keys import make_key_file
from rendezvous.types import Role

GOOD: dict[str, Any] = {"run_id": "run", "name": "a", "bind": "127.0.0.1:0"}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"run_id": ""}, "run_id must have 1 to 256 characters"),
        ({"name": "x" * 257}, "name must have 1 to 256 characters"),
        ({"bind": "127.0.0.1"}, "bind '127.0.0.1' is not \"host:port\""),
        ({"bind": "::1:80"}, "bind '::1:80' is not"),
        ({"bind": "host:70000"}, "with a port of 0..65535"),
        ({"advertise": "a b:1"}, "advertise 'a b:1' is not"),
        ({"contacts": ("127.0.0.1:7001", "oops")}, "contact 'oops' is not"),
        ({"contacts": ("127.0.0.1:0",)}, "with a port of 1..65535"),
        ({"contacts": ("dir:relative",)}, "contact 'dir:relative' is not of the form dir:/path"),
        ({"contacts": ("slurm:x",)}, "contact 'slurm:x' is not of the form slurm:PORT"),
        ({"num_nodes_min": 3, "num_nodes_max": 2}, "1 <= num_nodes_min <= num_nodes_max must hold, not 3 and 2"),
        ({"fence": " "}, "fence is empty"),
        ({"fence": "sh -c 'open"}, "is no command: No closing quotation"),
        ({"num_nodes_min": 0}, "not 0 and 1"),
        ({"num_workers": 0}, "num_workers is too small for a node"),
        ({"num_workers": -1, "role": Role.WITNESS}, "num_workers is too small for a witness"),
        ({"num_spares_expected": -1}, "num_spares_expected is too small"),
        ({"first_view_last_call_s": -1.0}, "first_view_last_call_s must not be negative"),
        ({"key": b"short"}, "key must have at least 16 bytes"),
        ({"probe_interval_s": 1.0, "failure_s": 2.0}, "failure_s at least five times as long"),
        ({"probe_interval_s": 0.0}, "leave no time to judge"),
        ({"probe_interval_s": float("nan")}, "leave no time to judge"),
    ],
)
def test_config_that_cannot_work_is_refused_by_name(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        Config(**{**GOOD, **change})


@pytest.mark.parametrize(
    "contact", ["127.0.0.1:1", "[::1]:65535", "node-7.cluster:4000", "dir:/shared/run", "slurm:7000"]
)
def test_every_form_of_contact_is_taken(contact: str) -> None:
    assert Config(**GOOD, contacts=(contact,)).contacts == (contact,)


def test_secret_is_not_shown() -> None:
    assert "0123456789" not in repr(Config(**GOOD, key=b"0123456789abcdef"))


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_ladder_of_timeouts_keeps_its_order_in_every_preset(preset: str) -> None:
    timing = Timing(*PRESETS[preset])
    assert 0 < timing.probe_timeout_s < timing.probe_interval_s < timing.suspicion_min_s < timing.suspicion_max_s
    # the probe comes within one interval, fails within another, and the suspicion ends: that is the whole bound
    assert 2 * timing.probe_interval_s + timing.suspicion_max_s <= timing.failure_s
    assert timing.collect_s < timing.attempt_s < timing.failure_s
    assert timing.stall_s > timing.probe_interval_s


def test_environment_completes_arguments_and_never_beats_them() -> None:
    env = {
        "P2PSTATE_RUN_ID": "from-env",
        "P2PSTATE_NAME": "env-name",
        "P2PSTATE_BIND": "127.0.0.1:1",
        "P2PSTATE_CONTACTS": "127.0.0.1:7001, 127.0.0.1:7002,",
        "P2PSTATE_KEY": "00" * 16,
        "P2PSTATE_PRESET": "local",
    }
    config = Config.from_env(env, name="argument", probe_interval_s=0.2)
    assert (config.run_id, config.name, config.bind) == ("from-env", "argument", "127.0.0.1:1")
    assert config.contacts == ("127.0.0.1:7001", "127.0.0.1:7002")
    assert config.key == bytes(16)
    assert (config.probe_interval_s, config.failure_s) == (0.2, PRESETS["local"][1])


@pytest.mark.parametrize(
    ("env", "arguments", "text"),
    [
        ({}, {}, "run_id, name, bind must be given, as arguments or as P2PSTATE_RUN_ID, P2PSTATE_NAME, P2PSTATE_BIND"),
        ({"P2PSTATE_KEY": "xyz"}, GOOD, "P2PSTATE_KEY must be hexadecimal"),
        ({"P2PSTATE_PRESET": "fast"}, GOOD, "preset must be one of"),
    ],
)
def test_environment_that_cannot_work_is_refused(env: dict[str, str], arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Config.from_env(env, **arguments)


def test_max_size_counts_everybody_who_is_expected() -> None:
    config = Config(**GOOD, num_nodes_max=4, num_spares_expected=2, num_witnesses_expected=1)
    assert config.max_size == 7


def test_key_file_is_read_where_no_key_is_given(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    make_key_file(str(path))
    found = Config.from_env({"P2PSTATE_KEY_FILE": str(path)}, **GOOD).key
    assert found == bytes.fromhex(path.read_text())
    assert Config.from_env({"P2PSTATE_KEY_FILE": str(path), "P2PSTATE_KEY": "ab" * 32}, **GOOD).key == b"\xab" * 32


def test_labels_come_from_the_environment_unless_given() -> None:
    env = {"P2PSTATE_LABELS": "rack=r1, zone=z2"}
    assert Config.from_env(env, **GOOD).labels == {"rack": "r1", "zone": "z2"}
    assert Config.from_env(env, **GOOD, labels={"rack": "r9"}).labels == {"rack": "r9"}
    with pytest.raises(ValueError, match="P2PSTATE_LABELS 'rack' is not of the form"):
        Config.from_env({"P2PSTATE_LABELS": "rack"}, **GOOD)


def test_interface_gives_the_address_for_others_and_without_bind_the_one_to_listen_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entries = {
        "ib0": [(socket.AF_INET, "10.1.0.7"), (socket.AF_INET6, "fe80::7%ib0"), (socket.AF_INET6, "2001:db8::7")],
        "v6": [(socket.AF_INET6, "fe80::8%v6"), (socket.AF_INET6, "2001:db8::8")],
        "down": [(socket.AF_INET6, "fe80::9%down")],
    }
    table = {name: [SimpleNamespace(family=f, address=a) for f, a in found] for name, found in entries.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: table)

    def read(**more: Any) -> tuple[str, str | None, bool | None]:
        config = Config.from_env({}, run_id="run", name="a", **more)
        return config.bind, config.advertise, config.host_owned

    assert read(iface="ib0") == ("10.1.0.7:0", "10.1.0.7:0", True)
    assert read(iface="v6") == ("[2001:db8::8]:0", "[2001:db8::8]:0", True)
    assert read(iface="ib0", bind="0.0.0.0:7000") == ("0.0.0.0:7000", "10.1.0.7:0", True)
    assert read(iface="ib0", bind="[::]:7000") == ("[::]:7000", "[2001:db8::7]:0", True)
    assert Config.from_env({"P2PSTATE_IFACE": "ib0"}, run_id="run", name="a").advertise == "10.1.0.7:0"
    with pytest.raises(ValueError, match="no network interface 'eth9' here, but down, ib0, v6"):
        read(iface="eth9")
    with pytest.raises(ValueError, match="'down' has no address that others can use"):
        read(iface="down")
    with pytest.raises(ValueError, match="given twice"):
        read(iface="ib0", advertise="10.1.0.7:7000")
