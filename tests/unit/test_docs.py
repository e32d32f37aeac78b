"""The documentation: links lead somewhere, options exist, commands are ones the programs take, Python compiles."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pstate import errors
from p2pstate.cli import _parser, main, p2prun
from rendezvous.types import EXIT_STOPPED

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
ALL = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
COMMANDS = {
    "p2prun": ("", "witness", "status", "stop", "assume-dead"),
    "p2pstate": ("keygen", "verdict", "doctor", "plan", "data pack"),
}
# Options of other programs, which the pages speak of.
FOREIGN = {
    "docker": {"--build-arg"},
    "mypy": {"--strict"},
    "kind": {"--image"},
    "kubectl": {"--for", "--timeout"},
    "srun": {"--cpu-bind", "--kill-on-bad-exit", "--no-kill", "--wait"},
    "sbatch": {"--gpus-per-node", "--nodes", "--no-kill", "--signal"},
    "torchrun": {"--max-restarts", "--nnodes", "--nproc-per-node"}
    | {f"--rdzv-{name}" for name in ("backend", "conf", "endpoint", "id")},
    "scripts of the repository": {"--namespaces", "--silent", "--steps"},
}
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]")


def code_of(text: str) -> list[str]:
    """Every piece of code of a page: blocks, and spans within a line."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    indented = re.findall(r"(?:^    .*\n)+", rest, re.MULTILINE)
    return [*fenced, *indented, *re.findall(r"`([^`\n]+)`", rest)]


def commands(text: str) -> Iterator[list[str]]:
    """Words of the shell commands in indented blocks, lines that go on put together, without comments."""
    for block in re.findall(r"(?:^    .*\n?)+", text, re.MULTILINE):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            if line.split()[:1] and line.split()[0] in COMMANDS:
                yield shlex.split(line, comments=True)


def slug(heading: str) -> str:
    """As MkDocs and GitHub make an anchor."""
    plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", plain))


def anchors(path: Path) -> set[str]:
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)}


@pytest.fixture(scope="module")
def known() -> set[str]:
    """Every option that one of our commands takes, by their own help."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        for program, names in COMMANDS.items():
            run = p2prun if program == "p2prun" else main
            for name in names:
                with contextlib.suppress(SystemExit):
                    run([*name.split(), "--help"])
    return set(OPTION.findall(out.getvalue()))


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_docs_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(path), f"{page.name}: no heading for {target}"


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_docs_name_only_options_that_exist(page: Path, known: set[str]) -> None:
    named = {option for code in code_of(page.read_text()) for option in OPTION.findall(code)}
    foreign = set().union(*FOREIGN.values())
    assert not named - known - foreign


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_docs_commands_are_ones_that_the_programs_take(page: Path, known: set[str]) -> None:
    for program, *words in commands(page.read_text()):
        if program == "p2prun" and words[0] not in COMMANDS["p2prun"]:
            options = _parser().parse_args(words)  # ends the test where it does not understand
            assert options.script.endswith(".py")
        else:
            assert any(words[: len(name.split())] == name.split() for name in COMMANDS[program] if name), words
            assert {word for word in words if word.startswith("--")} <= known


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_docs_python_compiles(page: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        ast.parse(block)


def test_docs_navigation_lists_every_page_once() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("nav:")[2]
    assert sorted(re.findall(r": (\S+\.md)$", nav, re.MULTILINE)) == [page.name for page in PAGES]


def test_docs_exit_codes_are_those_of_the_program() -> None:
    codes = {0, 1, EXIT_STOPPED, *(getattr(errors, name) for name in dir(errors) if name.startswith("EXIT_"))}
    table = (ROOT / "docs" / "guarantees.md").read_text().partition("## Exit codes")[2].partition("\n## ")[0]
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)} == codes
