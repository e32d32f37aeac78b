"""What the commands say to somebody who mistypes, or asks for help."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from p2pstate.arguments import Parser, path
from p2pstate.cli import main, p2prun
from p2pstate.errors import EXIT_CONFIG
from p2pstate.operating import OPERATING
from p2pstate.tools import TOOLS


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["stauts"], "commands are status, stop, assume-dead, witness"),
        (["status"], "--contacts is missing: list host:port of some nodes of the run"),
        (["--nnodes", "2", "--contacts", "10.0.0.1:7000", "train.py"], "--bind is missing: 10.0.0.1:7000 is on the"),
        (["--standalone", "--nnodes", "2", "train.py"], "--standalone means one node"),
        (["--nproc_per_node", "0", "train.py"], "--nproc-per-node 0: at least one worker"),
        (["--nproc-per-node", "gpu", "train.py"], "--nproc-per-node 0: at least one worker"),
        (["--log_dir=train.py", "train.py"], "train.py"),
        (["--key-file", "none.key", "train.py"], "there is no key file none.key; make one with `p2pstate keygen"),
        (["--key-file=~/none.key", "train.py"], "there is no key file /home/me/none.key; make one"),
    ],
)
def test_p2prun_mistake_is_answered_with_what_to_do(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    Path("train.py").touch()
    assert p2prun(arguments) == EXIT_CONFIG
    assert says in capsys.readouterr().err


def test_p2prun_without_a_script_says_so_in_a_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        p2prun([])
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "p2prun: error: the following arguments are required: script"
    assert len(lines) < 5


@pytest.mark.parametrize(
    ("program", "arguments", "says"),
    [
        (p2prun, ["--spars", "1", "train.py"], "unrecognized arguments: --spars; did you mean --spares?"),
        (p2prun, ["--rdzv_backend=c10d", "train.py"], "--contacts lists some nodes"),
        (p2prun, ["--nproc-per-node", "two", "train.py"], "'two' is none of: a number, auto, cpu, gpu"),
        (main, ["pln", "--gpus", "8"], "there is no command 'pln'; did you mean plan?"),
        (main, ["plan", "--gpus", "8", "--mtbf", "9", "--cupies", "2"], "p2pstate plan: error: unrecognized arguments"),
        (main, ["plan", "--gpus", "8", "--mtbf", "9", "--cupies", "2"], "did you mean --copies?"),
    ],
)
def test_unknown_word_is_answered_with_the_nearest_known_one(
    program: Any, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        program(arguments)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_every_option_that_names_a_file_or_folder_knows_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    parsers: list[argparse.ArgumentParser] = []
    parse = Parser.parse_known_args

    def remember(parser: Any, *args: Any) -> Any:
        parsers.append(parser)
        return parse(parser, *args)

    monkeypatch.setattr(Parser, "parse_known_args", remember)
    commands = [(p2prun, words) for words in ([], ["witness"], *([name] for name in OPERATING))]
    tools = [(main, words) for words in (["data", "pack"], *([name] for name in TOOLS))]
    for program, words in commands + tools:
        with pytest.raises(SystemExit):
            program([*words, "--help"])
    named = []
    for parser in parsers:
        for action in parser._actions:
            if action.metavar and re.search(r"\b(FILE|DIR|RUN_DIR|INPUT)\b", str(action.metavar)):
                named.append(action.dest)
                assert action.type is path, f"{parser.prog} {action.option_strings}"
    assert {"run_dir", "key_file", "output", "plot", "schedule", "token_file", "inputs"} <= set(named)
    assert path("~/runs") == Path("/home/me/runs")
    with pytest.raises(argparse.ArgumentTypeError, match="variable empty"):
        path("")


def test_command_that_cannot_say_it_says_why() -> None:
    command = [sys.executable, "-m", "p2pstate", "plan", "--gpus", "8", "--mtbf", "1"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    assert "could not be written: No space left on device" in ended.stderr


def test_command_whose_reader_leaves_ends_without_a_word(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "import sys; from p2pstate.cli import main; sys.exit(main())",
        "verdict",
        str(tmp_path),
    ]
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing) as out:
        ended = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, timeout=60)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.parametrize("command", [[], ["--help"], ["chaos", "--help"], ["doctor", "--help"]])
def test_help_names_no_default_that_says_nothing(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for program, arguments in ((main, command), (p2prun, ["--help"])):
        with contextlib.suppress(SystemExit):
            program(arguments)
        said = capsys.readouterr().out
        assert said
        said_at_once = " ".join(said.split())
        assert not [text for text in ("None", ")", "False", "[]") if f"(default: {text}" in said_at_once]


def test_tools_run_as_a_module_and_do_not_wait_for_what_nodes_of_a_run_import(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "p2pstate", "keygen", str(tmp_path / "run.key")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "run.key").exists()
    assert "rendezvous.keys" in ended.stderr
    assert not [name for name in ("torch", "zmq", "p2pstate.agent") if f" {name}\n" in ended.stderr]
