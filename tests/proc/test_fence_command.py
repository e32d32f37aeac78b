"""The fencing command as a real process: what its exit status means, and that it can hold nobody up."""

from __future__ import annotations

import os
import queue
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rendezvous.fence_command import FenceCommand
from rendezvous.messages import Status
from rendezvous.types import Member, MemberKey

B = Member("node-b", 1_700_000_000_000_000, "10.0.0.2:7000")
Answer = tuple[MemberKey, Status | None, str]
Ask = Callable[..., tuple[FenceCommand, "queue.SimpleQueue[Answer]"]]


@pytest.fixture
def asking(tmp_path: Path) -> Iterator[Ask]:
    made: list[FenceCommand] = []

    def make(script: str, timeout_s: float = 20.0, options: str = "") -> tuple[FenceCommand, queue.SimpleQueue[Answer]]:
        path = tmp_path / "fence.sh"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        report = lambda *answer: answers.put(answer)  # noqa: E731
        made.append(FenceCommand(f"'{path}' {options}", "my run", report, timeout_s))
        return made[-1], answers

    yield make
    for command in made:
        command.close()


@pytest.mark.parametrize(
    ("script", "status", "text"),
    [
        ("echo checking; echo off since noon; exit 0", Status.GONE, "is gone (off since noon)"),
        ("exit 3", Status.FENCED, "is gone with all it began"),
        ("echo running >&2; exit 1", None, "is not gone (running)"),
        ("exit 2", None, "failed with status 2"),
        ("kill -9 $$", None, "failed with status -9"),
        ("yes | head -c 1000000; exit 3", Status.FENCED, "with all it began (y)"),
    ],
)
def test_exit_status_says_what_is_known(asking: Ask, script: str, status: Status | None, text: str) -> None:
    command, answers = asking(script)
    command.ask(B)
    key, found, sentence = answers.get(timeout=20)
    assert (key, found) == (B.key, status)
    assert text in sentence


def test_command_is_told_whom_it_is_asked_about_and_no_secret(asking: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2PSTATE_KEY", "5ec4e7")
    variables = "$P2PSTATE_FENCE_NODE $P2PSTATE_FENCE_ADDRESS $P2PSTATE_FENCE_STARTED_US $P2PSTATE_RUN_ID"
    command, answers = asking(f'echo "$#" "$@" {variables} "[$P2PSTATE_KEY]"', options="--zone 'z 1'")
    command.ask(B)
    said = f"4 --zone z 1 node-b {B.address} node-b {B.address} {B.incarnation} my run []"
    assert f"({said})" in answers.get(timeout=20)[2]


def test_fencing_command_of_the_operators_pods_reads_what_the_operator_wrote(asking: Ask, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    command, answers = asking(f'exec {sys.executable} -m p2pstate.operator.gone {tmp_path}/gone "$@"')
    told = ((str(B.incarnation - 1), None), (str(B.incarnation + 1), Status.GONE), ("soon", None))
    for text, status in told:
        (tmp_path / "gone" / B.name).write_text(text)
        command.ask(B)
        assert answers.get(timeout=20)[1] is status, text


def test_command_that_does_not_end_is_ended_with_what_it_started(asking: Ask, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    command, answers = asking(f"sleep 600 & echo $$ $! > {pids}; wait", timeout_s=1.0)
    command.ask(B)
    command.ask(B)  # one question at a time
    _, status, text = answers.get(timeout=20)
    assert (status, text) == (None, "the fencing command did not end within 1 s")
    assert answers.empty()
    until_s = time.monotonic() + 10
    while any(psutil.pid_exists(int(pid)) and not is_zombie(int(pid)) for pid in pids.read_text().split()):
        assert time.monotonic() < until_s, "a process of the fencing command outlives its time"
        time.sleep(0.05)


def is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_closing_ends_a_question_at_once_and_without_an_answer(asking: Ask) -> None:
    command, answers = asking("sleep 600")
    command.ask(B)
    began_s = time.monotonic()
    command.close()
    assert time.monotonic() - began_s < 5
    assert answers.empty()
    command.ask(B)
    assert answers.empty()


def test_member_named_like_an_option_is_not_asked_about(asking: Ask) -> None:
    command, answers = asking("exit 0")
    command.ask(Member("--force", 1, "10.0.0.2:7000"))
    assert answers.get(timeout=20)[1] is None


def test_command_that_does_not_exist_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=f"there is no command '{os.sep}nowhere{os.sep}fence'"):
        FenceCommand("/nowhere/fence --now", "run", lambda *answer: None)
