"""`p2prun assume-dead` and `--fence` release a side that has no majority; whoever comes back is counted out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from rendezvous_cluster import ROOT, Cluster, Process, cluster, in_view

from namespaces import Namespaces, why_not
from p2pstate.cli import p2prun
from p2pstate.errors import EXIT_CONFIG
from ports import free_ports

KEY = "00112233445566778899aabbccddeeff"
TWO = {"num_nodes_min": 1, "num_nodes_max": 2}


def start_two(running: Cluster) -> tuple[Process, Process, str]:
    """a and b in one view, and the contacts that lead to them."""
    contacts = [f"127.0.0.1:{port}" for port in free_ports(2)]
    a, b = (running.start(name, bind=bind, contacts=contacts) for name, bind in zip("ab", contacts, strict=True))
    running.wait(lambda: in_view(a, "ab") and in_view(b, "ab"), "a view of both")
    return a, b, ",".join(contacts)


def assume_dead(node: str, contacts: str, *options: str, prefix: Sequence[str] = ()) -> tuple[int, str]:
    command = [*prefix, sys.executable, "-m", "p2pstate.cli", "assume-dead", node, "--run-id", "test"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "P2PSTATE_KEY": KEY}
    done = subprocess.run(
        [*command, "--contacts", contacts, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        env=env,
    )
    return done.returncode, done.stdout


def needs_votes(process: Process) -> bool:
    return any("2 of 2 votes are needed and 1 came" in event["reason"] for event in process.find("waiting"))


def test_word_of_an_operator_is_refused_for_a_node_that_answers_and_taken_for_a_silent_one() -> None:
    with cluster(**TWO, key=KEY) as running:
        a, b, contacts = start_two(running)
        code, said = assume_dead("b", contacts)
        assert code == 1
        assert "a: b is alive: heard from" in said
        assert "b: b is this node itself" in said
        code, said = assume_dead("x", contacts)
        assert (code, "no vote of x is missed here; in the newest view are a, b" in said) == (1, True)

        b.signal(signal.SIGSTOP)
        running.wait(lambda: needs_votes(a), "a's waiting for b's vote")
        code, said = assume_dead("b", contacts, "--reason", "its host is off")
        assert (code, said) == (0, "a: b is assumed dead: its vote is not missed any more\n")
        running.wait(lambda: in_view(a, "a"), "a view without the silent node")
        assert a.find("view")[-1]["reason"] == "b is dead: assumed dead: its host is off"
        b.signal(signal.SIGCONT)
        running.wait(lambda: b.find("evicted"), "the end of the node that came back")
        assert not b.find("view")[1:]


def test_word_of_an_operator_without_the_key_or_the_run_reaches_nobody() -> None:
    with cluster(**TWO, key=KEY[::-1]) as running:
        _, _, contacts = start_two(running)
        code, said = assume_dead("b", contacts, "--timeout", "1")
        assert code == 1
        assert "nobody answered within 1 s" in said


def test_operator_is_told_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert p2prun(["assume-dead", "b"]) == EXIT_CONFIG
    assert "--contacts is missing" in capsys.readouterr().err
    assert p2prun(["assume-dead", "b", "--contacts", "10.0.0.1:7000"]) == EXIT_CONFIG
    assert "no key is set" in capsys.readouterr().err


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Namespaces]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    made = Namespaces(2, tmp_path / "scratch")
    yield made
    made.close()


@pytest.mark.netns
def test_node_that_is_silently_cut_is_assumed_dead_and_fenced_when_its_cable_is_back(network: Namespaces) -> None:
    contacts = [f"{address}:7000" for address in network.addresses]
    with cluster(**TWO, key=KEY, contacts=contacts) as running:
        a, b = (running.start(name, network.prefix(i), bind=contacts[i]) for i, name in enumerate("ab"))
        running.wait(lambda: in_view(a, "ab") and in_view(b, "ab"), "a view of both")
        network.cut(1)
        running.wait(lambda: needs_votes(a) and needs_votes(b), "both sides waiting, because either may be alone")
        code, said = assume_dead("b", ",".join(contacts), prefix=network.prefix(0))
        assert code == 0, said
        running.wait(lambda: in_view(a, "a"), "a view of a alone")
        network.mend(1)
        running.wait(lambda: b.find("evicted"), "the end of the node that came back", timeout_s=30)
        assert len(b.find("view")) == 1
        assert len(a.find("view")) == 2


@pytest.mark.netns
def test_fencing_command_releases_the_side_whose_peer_is_gone(network: Namespaces, tmp_path: Path) -> None:
    command = tmp_path / "gone.sh"
    off = tmp_path / "off"
    command.write_text(f'#!/bin/sh\ntest "$1" = b || exit 2\ntest -e {off} && echo "off for good"\n')
    command.chmod(0o755)
    contacts = [f"{address}:7000" for address in network.addresses]
    with cluster(**TWO, key=KEY, contacts=contacts) as running:
        a = running.start("a", network.prefix(0), bind=contacts[0], fence=str(command))
        b = running.start("b", network.prefix(1), bind=contacts[1])
        running.wait(lambda: in_view(a, "ab") and in_view(b, "ab"), "a view of both")
        network.cut(1)
        said = "b is silent and not known to be gone: the fencing command says that it is not gone"
        running.wait(lambda: a.find("waiting", reason=said), "the answer that b is not gone")
        assert in_view(a, "ab")
        b.signal(signal.SIGKILL)
        off.touch()
        running.wait(lambda: in_view(a, "a"), "a view of a alone")
        dead = a.find("member", kind="dead", name="b")[-1]
        assert (dead["proof"], dead["reason"]) == (True, "the fencing command says that it is gone (off for good)")
