"""Where contacts come from, and what is said when they do not come."""

from __future__ import annotations

import os
import queue
import socket
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from rendezvous import discovery, interfaces
from rendezvous.discovery import (
    ContactReader,
    bind_address,
    expand_hosts,
    is_literal,
    local_binds,
    own_address,
    publish,
    read_contacts,
)
from rendezvous.types import RendezvousError


@pytest.mark.parametrize(
    ("listed", "hosts"),
    [
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,12],m", ["n08", "n09", "n10", "n12", "m"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("n[1-2].cluster", ["n1.cluster", "n2.cluster"]),
        ("n[3,1],a,m[7]-x[1-2,9]", ["n3", "n1", "a", "m7-x1", "m7-x2", "m7-x9"]),
        ("t[0-1][0-1],[1-2]", ["t00", "t01", "t10", "t11", "1", "2"]),
        ("n[9-011]", ["n9", "n10", "n11"]),
    ],
)
def test_slurm_node_list_is_expanded(listed: str, hosts: list[str]) -> None:
    assert expand_hosts(listed) == hosts


@pytest.mark.parametrize(
    ("listed", "why"),
    [
        *((f"n[{item}]", "is no number") for item in ("a-b", "3-1", "1-", "-1", "", "1,", "1-2-3", "²", "x")),
        *((listed, "a bracket") for listed in ("n[1-2", "n1-2]", "n[1[2]]", "n[1", "n]1", "n[1,b")),
        *((listed, "a name is empty") for listed in ("", "a,", ",a", "a,,b", "a b", " a", "a [1]", "a[1 -2]")),
        *(
            (listed, "than 65536|most 65536")
            for listed in ("n[1-999999]", "n[1-40000]m[1-40000]", "n[1-40000],m[1-40000]")
        ),
    ],
)
def test_text_that_is_no_node_list_is_refused(listed: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"is no Slurm node list: .*({why})"):
        expand_hosts(listed)


def fake_resolver(monkeypatch: pytest.MonkeyPatch, table: dict[str, list[str]]) -> None:
    def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        if host not in table:
            raise socket.gaierror(-2, "Name or service not known")
        families = {address: socket.AF_INET6 if ":" in address else socket.AF_INET for address in table[host]}
        return [(family, socket.SOCK_STREAM, 6, "", (address, port)) for address, family in families.items()]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def hide_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but names and contacts tells this host's address."""
    monkeypatch.setattr(discovery, "_default_route_host", lambda *, only_v4: "")
    monkeypatch.setattr(discovery, "only_host", lambda *, only_v4: "")


def test_name_with_many_records_gives_all_of_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_resolver(
        monkeypatch, {"cluster": ["10.0.0.1", "2001:db8::7", "fe80::1%eth0", "10.0.0.2"], "10.0.0.2": ["10.0.0.2"]}
    )
    addresses, problems = read_contacts(["cluster:7000", "10.0.0.2:7000"])
    assert addresses == ["10.0.0.1:7000", "[2001:db8::7]:7000", "10.0.0.2:7000"]
    assert problems == []


def test_contact_that_does_not_resolve_is_a_sentence_and_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_resolver(monkeypatch, {"good": ["10.0.0.1"], "near": ["fe80::1%eth0"]})
    addresses, problems = read_contacts(["bad:1", "good:2", "near:3"])
    assert addresses == ["10.0.0.1:2"]
    assert problems[0].startswith("bad:1: ")
    assert problems[1:] == ["near:3: only link-local addresses, which mean nothing on other hosts"]


def test_slurm_contact_reads_the_node_list_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_resolver(monkeypatch, {"n1": ["10.0.0.1"], "n2": ["10.0.0.2"]})
    both = ["10.0.0.1:7000", "10.0.0.2:7000"]
    assert read_contacts(["slurm:7000"], {"SLURM_JOB_NODELIST": "n[1-2]"})[0] == both
    heterogeneous = {"SLURM_JOB_NODELIST_HET_GROUP_0": "n1", "SLURM_JOB_NODELIST_HET_GROUP_1": "n2"}
    assert read_contacts(["slurm:7000"], {"SLURM_JOB_NODELIST": "n1", **heterogeneous})[0] == both
    addresses, problems = read_contacts(["slurm:7000"], {})
    assert addresses == []
    assert "this is no Slurm job step" in problems[0]


def test_shared_directory_gives_what_the_members_left_there(tmp_path: Path) -> None:
    directory = tmp_path / "contacts"
    contacts = [f"dir:{directory}"]
    publish(contacts, "node/one", "10.0.0.1:7001")
    publish(contacts, "two", "[::1]:7002")
    publish(contacts, "two", "[::1]:7003")
    (directory / "half.address").write_text("10.0.0.")
    (directory / "notes.txt").write_text("10.0.0.9:1")
    addresses, problems = read_contacts(contacts)
    assert sorted(addresses) == ["10.0.0.1:7001", "[::1]:7003"]
    assert problems == []


def test_what_else_lies_in_a_shared_directory_hides_no_member(tmp_path: Path) -> None:
    publish([f"dir:{tmp_path}"], "a", "10.0.0.1:7000")
    (tmp_path / "folder.address").mkdir()
    (tmp_path / "dangling.address").symlink_to(tmp_path / "nowhere")
    (tmp_path / "garbage.address").write_bytes(b"\xff\x00" * 1000)
    os.mkfifo(tmp_path / "pipe.address")
    assert read_contacts([f"dir:{tmp_path}"]) == (["10.0.0.1:7000"], [])


def test_directory_that_is_not_there_yet_is_a_problem_and_no_error(tmp_path: Path) -> None:
    addresses, problems = read_contacts([f"dir:{tmp_path}/none"])
    assert addresses == []
    assert "No such file" in problems[0]


def test_directory_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RendezvousError, match="Make the directory writable, or list addresses instead"):
        publish([f"dir:{tmp_path}/file/below"], "a", "10.0.0.1:1")


@pytest.mark.parametrize(
    ("bind", "advertise", "address"),
    [
        ("127.0.0.1:0", None, "127.0.0.1:4711"),
        ("[::1]:0", None, "[::1]:4711"),
        ("127.0.0.1:0", "127.0.0.2:0", "127.0.0.2:4711"),
        ("0.0.0.0:0", "127.0.0.2:80", "127.0.0.2:80"),
    ],
)
def test_own_address_is_the_advertised_one_with_the_bound_port(bind: str, advertise: str | None, address: str) -> None:
    assert own_address(bind, advertise, 4711, []) == address


def test_bind_to_every_interface_uses_the_address_towards_a_contact() -> None:
    assert own_address("0.0.0.0:0", None, 4711, ["name:1", "127.0.0.1:9"]) == "127.0.0.1:4711"


def test_own_name_that_does_not_resolve_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_resolver(monkeypatch, {})
    hide_interfaces(monkeypatch)
    with pytest.raises(RendezvousError, match="Give an IP address with bind or advertise"):
        own_address("nowhere:0", None, 4711, [])
    with pytest.raises(RendezvousError, match="Give one with advertise"):
        own_address("0.0.0.0:0", None, 4711, [])


@pytest.mark.parametrize(
    ("contact", "literal"), [("10.0.0.1:1", True), ("[::1]:1", True), ("a:1", False), ("dir:/x", False)]
)
def test_only_literal_addresses_are_read_without_waiting(contact: str, literal: bool) -> None:
    assert is_literal(contact) is literal


def test_reader_reports_what_changes_and_waits_for_no_slow_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table changes, and one name takes as long to resolve as the test lasts."""
    free, table = threading.Event(), {"10.0.0.9": ["10.0.0.9"]}
    fake_resolver(monkeypatch, table)
    answer_at_once = socket.getaddrinfo

    def getaddrinfo(host: str, port: int, **more: Any) -> list[Any]:
        assert host != "slow" or free.wait(20)
        return answer_at_once(host, port, **more)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    reports: queue.SimpleQueue[tuple[list[str], list[str]]] = queue.SimpleQueue()
    reader = ContactReader(
        ["slow:1", "late:2", "10.0.0.9:3"], 0.001, lambda addresses, problems: reports.put((addresses, problems))
    )

    def wait_for(wanted: list[str]) -> list[str]:
        while True:
            addresses, problems = reports.get(timeout=10)
            if addresses == wanted:
                return problems

    wait_for(["10.0.0.9:3"])
    table["late"] = ["10.0.0.2"]
    wait_for(["10.0.0.2:2", "10.0.0.9:3"])
    table["late"] = ["10.0.0.4"]
    assert wait_for(["10.0.0.4:2", "10.0.0.9:3"]) == []
    free.set()
    assert [problem[:7] for problem in wait_for(["10.0.0.4:2", "10.0.0.9:3"])] == ["slow:1:"]
    reader.close()
    for thread in reader._threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in reader._threads)


def test_agent_listens_where_the_contacts_name_this_host_and_else_anywhere() -> None:
    assert local_binds(["127.0.0.1:7001", "127.0.0.1:7002"]) == ["127.0.0.1:7001", "127.0.0.1:7002", "127.0.0.1:0"]
    assert local_binds(["192.0.2.1:7001", "127.0.0.1:7002"]) == ["127.0.0.1:7002", "0.0.0.0:0"]
    assert local_binds(["[::1]:7001"])[-1] == "[::1]:0"
    assert local_binds([]) == ["127.0.0.1:0"]


def test_agent_does_not_hide_on_loopback_from_contacts_that_name_nobody_yet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_resolver(monkeypatch, {socket.gethostname(): ["127.0.1.1"]})
    monkeypatch.setattr(discovery, "_default_route_host", lambda *, only_v4: "10.0.0.5")
    for contacts in (["late:7001"], [f"dir:{tmp_path}"], ["127.0.0.1:7001", "late:7001"]):
        assert local_binds(contacts)[-1] == "0.0.0.0:0"
    assert own_address("0.0.0.0:0", None, 4711, ["late:7001"]) == "10.0.0.5:4711"
    hide_interfaces(monkeypatch)
    entry = psutil.net_if_addrs()["lo"][0]._replace(family=socket.AF_INET, address="10.0.0.6")
    table = {"lo": [entry._replace(address="127.0.0.1")], "eth0": [entry]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: table)
    monkeypatch.setattr(discovery, "only_host", interfaces.only_host)
    assert own_address("0.0.0.0:0", None, 4711, ["late:7001"]) == "10.0.0.6:4711"
    table["eth1"] = [entry._replace(address="10.1.0.6")]
    with pytest.raises(RendezvousError, match="Give one with advertise"):
        own_address("0.0.0.0:0", None, 4711, ["late:7001"])


@pytest.mark.parametrize(
    ("records", "local", "binds"),
    [
        ({"node1": ["10.0.0.1", "2001:db8::1"]}, ["10.0.0.1", "2001:db8::1", "::"], ["[::]:7001", "10.0.0.1:7001"]),
        ({"node1": ["10.0.0.1", "10.1.0.1"]}, ["10.0.0.1", "10.1.0.1"], ["0.0.0.0:7001", "10.0.0.1:7001"]),
        ({"node1": ["10.0.0.1", "10.0.0.2", "10.0.0.3"]}, ["10.0.0.2"], ["10.0.0.2:7001", "0.0.0.0:0"]),
        ({"node1": ["127.0.1.1", "2001:db8::1"]}, ["2001:db8::1", "::"], ["[::]:7001", "0.0.0.0:7001"]),
        ({"node1": ["2001:db8::2"]}, ["::"], ["[::]:0"]),
        ({"node1": ["10.0.0.2", "2001:db8::2"]}, ["::"], ["[::]:0"]),
        ({"node1": ["10.0.0.2", "2001:db8::2"]}, [], ["0.0.0.0:0"]),
        ({"localhost": ["::1", "127.0.0.1"]}, ["::1", "127.0.0.1", "::"], ["[::1]:7001", "127.0.0.1:7001"]),
        ({"localhost": ["::1", "127.0.0.1"]}, ["127.0.0.1"], ["127.0.0.1:7001", "127.0.0.1:0"]),
    ],
    ids=[
        "both families here",
        "two interfaces",
        "one record for each host",
        "own name, and IPv6",
        "elsewhere, IPv6",
        "elsewhere, both families",
        "no IPv6 here",
        "localhost",
        "localhost without IPv6",
    ],
)
def test_name_with_several_addresses_is_listened_at_wherever_others_may_reach_it(
    monkeypatch: pytest.MonkeyPatch, records: dict[str, list[str]], local: list[str], binds: list[str]
) -> None:
    fake_resolver(monkeypatch, records)
    monkeypatch.setattr(discovery, "is_local", lambda host: host in local)
    (name,) = records
    assert local_binds([f"{name}:7001"])[: len(binds)] == binds


def test_bound_name_is_listened_at_where_others_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_resolver(monkeypatch, {"node1": ["10.0.0.1", "2001:db8::1"]})
    assert bind_address("node1", 7001) == own_address("node1:7001", None, 7001, []) == "10.0.0.1:7001"
    assert bind_address("::", 0) == "[::]:0"
    assert bind_address("no-such-name", 7001) == "no-such-name:7001"


def test_own_address_is_one_that_the_bound_socket_answers_at(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_resolver(monkeypatch, {"localhost": ["::1", "127.0.0.1"], "six": ["2001:db8::2"], socket.gethostname(): []})
    assert own_address("0.0.0.0:0", None, 4711, ["localhost:1"]) == "127.0.0.1:4711"
    assert own_address("[::]:0", None, 4711, ["localhost:1"]) == "[::1]:4711"
    with pytest.raises(RendezvousError, match=r"over IPv4 only and the contacts over IPv6 only: bind \[::\]"):
        own_address("0.0.0.0:0", None, 4711, ["six:1"])


def test_own_name_that_means_loopback_here_stands_for_every_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "resolve", lambda host, port: [f"127.0.1.1:{port}"])
    hide_interfaces(monkeypatch)
    assert local_binds(["node1:7001"]) == ["0.0.0.0:7001", "0.0.0.0:0"]
    with pytest.raises(RendezvousError, match="only loopback addresses"):
        own_address("0.0.0.0:0", None, 7001, ["node1:7001"])
