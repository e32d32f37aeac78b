"""tools/docs.py: the reference covers what is public, and what is public is described. `make docs` builds the site."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("docs_site", ROOT / "tools" / "docs.py")
assert SPEC is not None
assert SPEC.loader is not None
site = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(site)

NAMES = [(module, name) for module in site.PUBLIC for name in importlib.import_module(module).__all__]
NAMES += [(module, name) for module, names in site.OTHERS.items() for name in names]


def members(owner: type) -> Iterator[tuple[str, Any]]:
    """What the class itself defines for its users: methods and properties."""
    for name, value in vars(owner).items():
        if not name.startswith("_") and (inspect.isroutine(value) or isinstance(value, property)):
            yield name, value


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_public_object_and_its_members_have_docstrings(module: str, name: str) -> None:
    value = getattr(importlib.import_module(module), name)
    if not callable(value):
        return  # a constant, which a comment describes
    assert inspect.getdoc(value), f"{module}.{name}"
    assert not str(inspect.getdoc(value)).startswith(f"{name}("), f"{module}.{name}: only what dataclass makes"
    if isinstance(value, type):
        assert [member for member, function in members(value) if not inspect.getdoc(function)] == []


def test_reference_page_has_every_public_name() -> None:
    page = site.api_page()
    for module, name in NAMES:
        section = page.split(f".. currentmodule:: {module}\n")[1].split(".. currentmodule::")[0]
        assert re.search(rf":: {name}$", section, re.MULTILINE), f"{module}.{name}"


def test_commands_page_has_every_command_of_both_programs() -> None:
    found = dict(site.help_texts())
    assert {"p2prun", "p2prun witness", "p2prun status", "p2pstate", "p2pstate plan", "p2pstate data pack"} <= set(
        found
    )
    assert all(text.startswith("usage: ") for text in found.values())


def test_site_stages_what_pages_link_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "api_page", lambda: "# API")
    monkeypatch.setattr(site, "commands_page", lambda: "# Commands")
    site.stage(tmp_path / "source")
    assert (tmp_path / "source" / "examples" / "slurm" / "train.sbatch").exists()
    shown = (tmp_path / "source" / "examples" / "kubernetes" / "index.md").read_text()
    assert "kind: JobSet" in shown
    assert "(../examples/kubernetes/index.md)" in (tmp_path / "source" / "docs" / "kubernetes.md").read_text()
    contents = (tmp_path / "source" / "docs" / "index.md").read_text().partition("toctree")[2]
    assert set(site.pages_in_order()) - {"index.md"} <= {f"{line}.md" for line in contents.splitlines()}
