"""The documentation: links lead somewhere, options exist, commands are ones the programs take, Python compiles."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import p2pstate
from p2pstate import errors
from p2pstate.cli import _parser, main, p2prun
from p2pstate.data import Loader, Sampler, Shuffled
from p2pstate.operating import OPERATING
from rendezvous.types import EXIT_STOPPED

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
ALL = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PROGRAMS = {"p2prun": p2prun, "p2pstate": main}
OF_P2PRUN = ("witness", *OPERATING)
ACCELERATE = "main_process_ip machine_rank max_restarts multi_gpu num_machines num_processes rdzv_backend rdzv_conf"
# Options of other programs, which the pages speak of.
FOREIGN = {
    "ray": {"--head", "--num-cpus"},
    "accelerate": {f"--{name}" for name in ACCELERATE.split()},
    "docker": {"--build-arg"},
    "mypy": {"--strict"},
    "kind": {"--image"},
    "kubectl": {"--for", "--from-file", "--timeout"},
    "srun": {"--cpu-bind", "--export", "--het-group", "--kill-on-bad-exit", "--no-kill", "--wait"},
    "sbatch": {"--array", "--gpus-per-node", "--nodes", "--no-kill", "--partition", "--signal"},
    "torchrun": {"--max-restarts", "--monitor-interval", "--nnodes", "--nproc-per-node", "--standalone"}
    | {f"--rdzv-{name}" for name in ("backend", "conf", "endpoint", "id")},
    "accelerate launch": {"--machine_rank", "--main_process_ip", "--max_restarts", "--multi_gpu", "--rdzv_backend"}
    | {"--main_process_port", "--num_machines", "--num_processes", "--rdzv_conf"},
    "scripts of the repository": {
        "--checkpoint",
        "--checkpoint-every",
        "--device",
        "--namespaces",
        "--out",
        "--share-cards",
        "--silent",
        "--steps",
    }
    | {"--gpus", "--nodes", "--workers"},
}
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z_-]*[a-z]")


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
            if line.split()[:1] and line.split()[0] in PROGRAMS:
                yield shlex.split(line, comments=True)


def slug(heading: str) -> str:
    """As MkDocs and GitHub make an anchor."""
    plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", plain))


def anchors(path: Path) -> set[str]:
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)}


def help_of(program: str, *words: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        PROGRAMS[program]([*words, "--help"])
    return out.getvalue()


def subcommands(text: str) -> list[str]:
    """The names that argparse lists under COMMAND or ACTION."""
    listed = re.search(r"^  (?:COMMAND|ACTION)\n((?:    .*\n)+)", text, re.MULTILINE)
    return re.findall(r"^    ([a-z-]+)", listed.group(1), re.MULTILINE) if listed else []


@pytest.fixture(scope="module")
def options_of() -> dict[str, set[str]]:
    """The options of each of our commands, by their own help; a command is named with its program."""
    texts = {"p2prun": help_of("p2prun")} | {f"p2prun {name}": help_of("p2prun", name) for name in OF_P2PRUN}
    todo: list[tuple[str, ...]] = [("p2pstate",)]
    while todo:
        words = todo.pop()
        texts[" ".join(words)] = text = help_of(*words)
        todo += [(*words, name) for name in subcommands(text)]
    return {name: set(OPTION.findall(text)) for name, text in texts.items()}


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
def test_docs_name_only_options_that_exist(page: Path, options_of: dict[str, set[str]]) -> None:
    named = {option for code in code_of(page.read_text()) for option in OPTION.findall(code)}
    assert not named.difference(*options_of.values(), *FOREIGN.values())


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_docs_commands_are_ones_that_the_programs_take(page: Path, options_of: dict[str, set[str]]) -> None:
    for words in commands(page.read_text()):
        if words[0] == "p2prun" and words[1] not in OF_P2PRUN:
            options = _parser().parse_args(words[1:])  # ends the test where it does not understand
            assert options.module or options.script.endswith((".py", "...")), words
            continue
        found = max((name for name in options_of if words[: len(name.split())] == name.split()), key=len)
        assert " " in found, f"no such command: {words}"
        assert {word for word in words if word.startswith("--")} <= options_of[found], found


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_docs_python_compiles(page: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        ast.parse(block)


def test_docs_diffs_import_what_is_public() -> None:
    lines = re.findall(
        r"^\+from (p2pstate[\w.]*) import (.+)$", (ROOT / "docs" / "trainers.md").read_text(), re.MULTILINE
    )
    assert {module for module, _ in lines} > {"p2pstate.data"}
    for module, names in lines:
        path = ROOT / module.replace(".", "/")
        text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
        public = {
            constant
            for node in ast.parse(text).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            for constant in ast.literal_eval(node.value)
        }
        assert set(names.split(", ")) <= public, module


def test_docs_navigation_lists_every_page_once() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("nav:")[2]
    assert sorted(re.findall(r": (\S+\.md)$", nav, re.MULTILINE)) == [page.name for page in PAGES]


def test_docs_exit_codes_are_those_of_the_program() -> None:
    codes = {0, 1, EXIT_STOPPED, *(getattr(errors, name) for name in dir(errors) if name.startswith("EXIT_"))}
    table = (ROOT / "docs" / "guarantees.md").read_text().partition("## Exit codes")[2].partition("\n## ")[0]
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)} == codes


def python_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ["docs/adopting.md", "docs/data.md"])
def test_docs_data_block_runs_as_it_stands(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.jsonl").write_text("".join(f'{{"text": "{"word " * 300}"}}\n' for _ in range(20)))
    assert main(["data", "pack", "corpus.jsonl", "--output", "corpus.bin"]) == 0
    (block,) = (code for code in python_blocks(page) if "from p2pstate.data import" in code)
    names: dict[str, Any] = {"rank": 1, "world_size": 2, "dataset": list(range(64))}
    of_four = Loader(names["dataset"], batch_sampler=Sampler(Shuffled(64), batch_size=8, rank=0, num_ranks=4))
    next(iter(of_four))
    names["position"] = of_four.state_dict()  # 32 samples
    exec(block, names)
    try:
        batches = list(names["loader"])
    finally:
        names["loader"].close()
    if page == "docs/adopting.md":  # goes on at the position: two of four batches of this rank
        assert [len(batch) for batch in batches] == [8, 8]
    else:
        assert {batch.shape for batch in batches} == {(8, 1025)}


@pytest.mark.parametrize("page", ["docs/adopting.md", "README.md"])
def test_docs_restartable_block_runs_once_where_nothing_restarts_it(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr("torch.distributed.init_process_group", lambda: calls.append("group"))
    (block,) = (code for code in python_blocks(page) if "@p2pstate.restartable" in code)
    names: dict[str, Any] = {"p2pstate": p2pstate, "torch": torch}
    names["load_newest_checkpoint"] = lambda: calls.append("load") or (None, None, 0)
    exec(block, names)
    assert calls[0] == "group"
