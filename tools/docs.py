"""Builds the documentation site, without a network: `python tools/docs.py build/docs` (or `make docs`).

In: docs/, the order of its pages in mkdocs.yml, what the pages link to in the repository, docstrings, the help texts of
the commands. Out: `html/` in the given folder, and `source/`, what Sphinx read. A broken link, a missing heading or a
malformed docstring ends the build with Sphinx's sentence and exit code 1.

The pages stay plain Markdown, which MkDocs and code hosts show as well. Only the reference (`docs/api.md` and
`docs/commands.md` of the site) is made here: from docstrings by autodoc, from `--help` of every command.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.util
import io
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

LINK = re.compile(r"\]\((\.\./[^)#\s]+)")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".sbatch": "bash"}
HELP_COLUMNS = 110

# What a program may rely on: the names in __all__ of these modules.
PUBLIC = {
    "p2pstate": "What a training script uses.",
    "p2pstate.data": "Data that goes on where it stopped; needs nothing else of p2pstate.",
    "p2pstate.observe": "Where the time goes, in any script.",
    "p2pstate.errors": "What can go wrong, by what the reader can do about it.",
}
# What the public names return, and the part of `rendezvous` that another program can build on.
OTHERS = {
    "p2pstate.block": ["StepBlock"],
    "p2pstate.description": ["Description"],
    "p2pstate.observe.goodput": ["Goodput"],
    "p2pstate.stats": ["ProtectionStats"],
    "p2pstate.data.loader_stats": ["LoaderStats"],
    "rendezvous.types": ["MemberKey", "Role", "Member", "View", "Verdict", "Application"],
    "rendezvous.config": ["Timing", "Config"],
    "rendezvous.node": ["Node"],
    "rendezvous.transport": ["Transport"],
}

CONF = """
project = "p2pstate"
copyright = "the p2pstate authors, Apache 2.0"
root_doc = "docs/index"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "p2pstate"
html_show_sourcelink = False
myst_heading_anchors = 4
napoleon_numpy_docstring = False
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_mock_imports = {mocked}
default_role = "literal"
maximum_signature_line_length = 100
"""


def help_texts() -> Iterator[tuple[str, str]]:
    """(command, its help) of every program and every command of it, in the order in which each lists them."""
    from p2pstate.cli import main, p2prun
    from p2pstate.operating import OPERATING
    from p2pstate.operator.command import main as operator

    programs: list[tuple[Callable[[Sequence[str]], int], tuple[str, ...]]] = [(p2prun, ("p2prun",))]
    programs += [(p2prun, ("p2prun", name)) for name in ("witness", *OPERATING)]
    programs += [(main, ("p2pstate",)), (operator, ("p2pstate-operator",))]
    while programs:
        program, words = programs.pop(0)
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            program([*words[1:], "--help"])
        yield " ".join(words), out.getvalue()
        listed = re.search(r"^  (?:COMMAND|ACTION)\n((?:    .*\n)+)", out.getvalue(), re.MULTILINE)
        names = re.findall(r"^    ([a-z-]+)", listed.group(1), re.MULTILINE) if listed else []
        programs[:0] = [(program, (*words, name)) for name in names]


def commands_page() -> str:
    sections = [f"## {name}\n\n```text\n{text.rstrip()}\n```\n" for name, text in help_texts()]
    return "\n".join(["# Commands\n\nWhat each command says with `--help`.\n", *sections])


def integrations() -> list[Path]:
    """Modules for other trainers."""
    return sorted((ROOT / "p2pstate" / "integrations").glob("[!_]*.py"))


def missing_trainers() -> list[str]:
    """Packages that integrations import and that are not here: autodoc pretends that they are."""
    imported: set[str] = set()
    for path in integrations():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                imported.add(node.module.partition(".")[0])
    return sorted(name for name in imported if importlib.util.find_spec(name) is None)


def api_page() -> str:
    """An automodule for each public module, in reStructuredText, which docstrings are written in."""
    lines = ["# API reference", "", "From the docstrings.", "", "```{eval-rst}"]
    for name, text in PUBLIC.items():
        module = importlib.import_module(name)
        lines += [name, "-" * len(name), "", text, "", f".. currentmodule:: {name}", ""]
        for public in module.__all__:
            lines += directive(module, public)
    for path in integrations():
        name = f"p2pstate.integrations.{path.stem}"
        lines += [name, "-" * len(name), "", f".. automodule:: {name}", "   :members:", ""]
    for name, names in OTHERS.items():
        module = importlib.import_module(name)
        lines += [name, "-" * len(name), "", f".. currentmodule:: {name}", ""]
        for public in names:
            lines += directive(module, public)
    return "\n".join([*lines, "```", ""])


def directive(module: ModuleType, name: str) -> list[str]:
    value = getattr(module, name)
    if not callable(value):
        return [f".. autodata:: {name}", ""]
    kind = "autoclass" if isinstance(value, type) else "autofunction"
    return [f".. {kind}:: {name}", *(["   :members:"] if kind == "autoclass" else []), ""]


def pages_in_order() -> list[str]:
    """Pages as the navigation in mkdocs.yml lists them."""
    import yaml

    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    return [page for entry in nav for page in entry.values()]


def table_of_contents(pages: Sequence[str]) -> str:
    names = "\n".join(page.removesuffix(".md") for page in pages)
    return f"\n```{{toctree}}\n:hidden:\n\n{names}\n```\n"


def stage(source: Path) -> None:
    """Fill ``source`` with what Sphinx reads, each file where it is in the repository."""
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(ROOT / "docs", source / "docs")
    pages = pages_in_order()
    (source / "docs" / "api.md").write_text(api_page(), encoding="utf-8")
    (source / "docs" / "commands.md").write_text(commands_page(), encoding="utf-8")
    further = sorted({target for page in pages for target in LINK.findall((source / "docs" / page).read_text("utf-8"))})
    listed = [*pages[1:], "commands.md", "api.md"]
    for target in further:
        origin = (ROOT / "docs" / target).resolve()
        copied = source / origin.relative_to(ROOT)
        copied.parent.mkdir(parents=True, exist_ok=True)
        if origin.is_dir():
            shutil.copytree(origin, copied, dirs_exist_ok=True)
            (copied / "index.md").write_text(listing(origin), encoding="utf-8")
            listed.append(f"{target}/index.md")
        elif origin.is_file():
            shutil.copy(origin, copied)
            listed += [target] if origin.suffix == ".md" else []
    for page in pages:  # a folder's page is the one that was made for it
        path = source / "docs" / page
        text = path.read_text(encoding="utf-8")
        linked = LINK.sub(lambda found: with_index(found.group(0), source / "docs" / found.group(1)), text)
        path.write_text(linked + (table_of_contents(listed) if page == pages[0] else ""), encoding="utf-8")
    (source / "conf.py").write_text(CONF.format(mocked=missing_trainers()), encoding="utf-8")


def with_index(link: str, target: Path) -> str:
    return f"{link}/index.md" if target.is_dir() else link


def listing(folder: Path) -> str:
    """A page that shows every file of a folder."""
    sections = [f"# {folder.relative_to(ROOT)}\n"]
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        language = LANGUAGES.get(path.suffix, "text")
        sections.append(f"## {path.relative_to(folder)}\n\n````{language}\n{path.read_text('utf-8').rstrip()}\n````\n")
    return "\n".join(sections)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build the documentation site.")
    parser.add_argument("folder", type=Path, help="where html/ and source/ go")
    options = parser.parse_args(argv)
    os.environ["COLUMNS"] = str(HELP_COLUMNS)
    try:
        from sphinx.cmd.build import build_main
    except ImportError:
        print("docs: Sphinx is not installed: pip install 'p2pstate[docs]'", file=sys.stderr)
        return 1
    source, html = options.folder / "source", options.folder / "html"
    stage(source)
    code = build_main(
        ["-W", "--keep-going", "-q", "-b", "html", "-d", str(options.folder / "trees"), str(source), str(html)]
    )
    if code == 0:
        (html / "index.html").write_text(
            '<meta http-equiv="refresh" content="0; url=docs/index.html">\n', encoding="utf-8"
        )
        print(f"{html}/index.html: {len(list(html.rglob('*.html')))} pages")
    return code


if __name__ == "__main__":
    sys.exit(main())
