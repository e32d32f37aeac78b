"""What p2pstate doctor finds on a host, and what it says is to be done."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from p2pstate import doctor
from p2pstate.cli import main
from p2pstate.doctor import Finding, Level
from p2pstate.memory import Bound
from rendezvous.config import Config
from rendezvous.keys import make_key_file

ANY = resource.RLIM_INFINITY
GIB = 2**30


def only(findings: Iterator[Finding]) -> Finding:
    (found,) = findings
    return found


@pytest.mark.parametrize(
    ("soft", "hard", "level", "fix"),
    [
        (ANY, ANY, Level.OK, ""),
        (65536, 65536, Level.OK, ""),
        (1024, ANY, Level.WARNING, "ulimit -n 4096"),
        (1024, 4096, Level.WARNING, "ulimit -n 4096"),
        (1024, 1024, Level.WARNING, "raise the hard limit (1024)"),
        (256, 256, Level.PROBLEM, "raise the hard limit (256)"),
    ],
)
def test_few_open_files_are_reported_with_the_limit_to_raise(soft: int, hard: int, level: Level, fix: str) -> None:
    found = only(doctor.check_open_files(soft, hard))
    assert found.level is level
    assert found.fix.startswith(fix)
    assert bool(found.fix) == bool(fix)


@pytest.mark.parametrize(
    ("limit", "card", "level"),
    [(ANY, True, Level.OK), (8 * 2**20, True, Level.WARNING), (8 * 2**20, False, Level.OK), (2 * GIB, True, Level.OK)],
)
def test_locked_memory_matters_where_there_is_a_card(limit: int, card: bool, level: Level) -> None:
    assert only(doctor.check_locked_memory(limit, card)).level is level


@pytest.mark.parametrize(("left", "level"), [(50 * GIB, Level.OK), (5 * GIB, Level.WARNING)])
def test_memory_that_is_nearly_used_up_is_a_warning_that_says_what_bounds_it(left: int, level: Level) -> None:
    found = only(doctor.check_memory(100 * GIB, Bound(left, "the limit of control group /a")))
    assert found.level is level
    assert f"{left / GIB:.1f} GiB of 100.0 GiB can be taken before the limit of control group /a stops it" in found.text


def test_small_shared_memory_says_how_to_enlarge_it() -> None:
    assert only(doctor.check_shared_memory(64 * 2**20)) == Finding(
        "/dev/shm",
        Level.WARNING,
        "64.0 MiB free: the vault does not use it, NCCL and data loaders with worker processes do",
        "docker --shm-size=8g; Kubernetes: an emptyDir of medium Memory",
    )
    assert only(doctor.check_shared_memory(2 * GIB)).level is Level.OK


@pytest.mark.parametrize(
    ("bind", "warned"), [("10.0.0.1:40000", True), ("10.0.0.1:7000", False), ("10.0.0.1:0", False)]
)
def test_port_that_the_kernel_may_give_away_is_a_warning(bind: str, warned: bool) -> None:
    config = Config("run", "a", bind)
    assert bool(list(doctor.check_port(config, "32768\t60999\n"))) is warned


@pytest.mark.parametrize(
    ("env", "levels"),
    [
        ({"GLOO_SOCKET_IFNAME": "lo"}, [Level.OK]),
        ({"GLOO_SOCKET_IFNAME": "nowhere0"}, [Level.PROBLEM]),
        ({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=nowhere0"}, [Level.OK, Level.PROBLEM]),
        ({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "^docker,eth"}, [Level.OK]),
    ],
)
def test_interface_that_gloo_or_nccl_is_told_must_exist(env: dict[str, str], levels: list[Level]) -> None:
    assert [found.level for found in doctor.check_interfaces(env, several_hosts=True)] == levels


@pytest.mark.parametrize(("card", "level"), [(True, Level.PROBLEM), (False, Level.WARNING)])
def test_handling_of_nccl_errors_by_torch_itself_is_a_problem_where_there_is_a_card(card: bool, level: Level) -> None:
    (found,) = doctor.check_nccl({"TORCH_NCCL_BLOCKING_WAIT": "1", "NCCL_DEBUG": "INFO"}, card)
    assert (found.level, found.text.partition(":")[0]) == (level, "TORCH_NCCL_BLOCKING_WAIT=1")
    assert found.fix
    assert not list(doctor.check_nccl({}, card))


@pytest.mark.parametrize(("address", "warned"), [("127.0.1.1", True), ("10.0.0.1", False)])
def test_host_name_that_means_loopback_is_where_gloo_listens(
    address: str, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(socket.AF_INET, 1, 6, "", (address, 0))])
    found = list(doctor.check_interfaces({}, several_hosts=True))
    assert [finding.level for finding in found] == [Level.WARNING] * warned
    found = list(doctor.check_interfaces({}, several_hosts=False))
    assert [finding.level for finding in found] == [Level.OK] * warned


def test_plugin_that_is_missing_or_broken_is_a_problem_and_a_good_one_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {
        "torchrun.handlers": [
            importlib.metadata.EntryPoint("p2p", "rendezvous.keys:SECRET_BYTES", "torchrun.handlers")
        ],
        "torch.backends": [importlib.metadata.EntryPoint("p2pstate", "no_such_module_at_all:f", "torch.backends")],
    }
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: installed.get(group, []))
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    found = list(doctor.check_plugins())
    assert [finding.level for finding in found] == [Level.OK, Level.PROBLEM, Level.PROBLEM, Level.WARNING]
    assert "no_such_module_at_all" in found[1].text
    assert "no entry point 'p2pstate' is installed for rendezvous.agents" in found[2].text


def test_reach_of_a_contact_is_told_in_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert doctor.reach(address) == "somebody listens there"
    assert doctor.reach(address) == "the host answers, nobody listens there yet"


def doctored(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    code = main(["doctor", "--json", *arguments])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["ready"] is (code == 0)
    by_subject: dict[str, list[dict[str, Any]]] = {}
    for finding in report["findings"]:
        by_subject.setdefault(finding["subject"], []).append(finding)
    return code, by_subject


def test_report_of_a_node_with_a_key_names_its_address_and_contacts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "run.key"
    make_key_file(str(key))
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = f"127.0.0.1:{server.getsockname()[1]}"
        _, found = doctored("--contacts", f"{other},no host:1", "--key-file", str(key), capsys=capsys)
        assert found["address"][0]["level"] == "problem"
        assert "contact 'no host:1' is not" in found["address"][0]["text"]
        _, found = doctored("--contacts", other, "--key-file", str(key), capsys=capsys)
    assert found["key"] == [{"subject": "key", "level": "ok", "text": "a key was read", "fix": ""}]
    assert found["contacts"][0]["text"] == f"{other}: somebody listens there"
    assert found["address"][0]["level"] == "ok"
    assert found["kernel"][0]["level"] == "ok"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--contacts", "10.0.0.1:7000"), "no key is set"),
        (("--contacts", "127.0.0.1:7000", "--iface", "nowhere0"), "there is no network interface 'nowhere0'"),
        (("--contacts", "127.0.0.1:7000", "--key-file", "/nowhere/key"), "/nowhere/key"),
        (("--bind", "10.255.255.1:0", "--insecure"), "the address must be this host's"),
    ],
)
def test_option_that_cannot_work_is_a_problem_and_the_rest_is_still_looked_at(
    arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = doctored(*arguments, capsys=capsys)
    assert code == 1
    assert text in found["address"][0]["text"]
    assert "/dev/shm" in found


def test_loopback_address_told_to_contacts_on_other_hosts_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = doctored("--contacts", "10.0.0.1:7000", "--bind", "127.0.0.1:0", capsys=capsys)
    assert code == 1
    assert found["contacts"][0]["fix"] == "give --bind, --iface or --advertise"


def test_report_for_a_person_has_a_line_for_each_finding(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("ok        contacts       none were given") for line in lines)
    assert any(line.startswith("ok        kernel         Linux ") for line in lines)


def test_check_that_fails_unexpectedly_is_reported_and_the_others_are_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Iterator[Finding]:
        raise RuntimeError("surprise")

    monkeypatch.setattr(doctor, "check_kernel", broken)
    code, found = doctored(capsys=capsys)
    assert code == 1
    assert "surprise" in found["kernel"][0]["text"]
    assert found["/dev/shm"]


def test_doctor_looks_at_the_same_options_as_a_node() -> None:
    parser = argparse.ArgumentParser()
    doctor.add_commands(parser.add_subparsers())
    options = parser.parse_args(["doctor", "--contacts", "a:1", "--iface", "lo", "--bind", "x:1", "--key-file", "k"])
    assert (options.contacts, options.iface, options.bind, options.key_file) == ("a:1", "lo", "x:1", Path("k"))
