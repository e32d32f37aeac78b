"""The rooms of both packages: who may import whom, and what must never be imported at all.

Each package's top-level docstring lists its modules from the top down, between the two marker lines below; a file
imports only what stands above it. Imports are read from the syntax tree: one inside a function or under
TYPE_CHECKING counts.
"""

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("rendezvous", "p2pstate")
BEGIN = "Layout, from the top down (a file imports only what stands above it):"
END = "End of layout."

# rendezvous stays usable without torch, and its network is behind one seam: only these files may import these modules
ONLY_IN = {
    "torch": {"rendezvous/store.py", "rendezvous/torchrun.py"},
    "zmq": {"rendezvous/zmq_transport.py"},
}
# A clock that is set must neither end nor evict anybody: it names and stamps things, and nothing waits by it
MAY_READ_WALL_CLOCK = {
    *("rendezvous/node.py", "rendezvous/operator.py"),  # incarnations
    *("p2pstate/agent/events.py", "p2pstate/agent/serving.py", "p2pstate/rounds.py"),  # events
    *("p2pstate/observe/meter.py", "p2pstate/observe/alone.py"),
    *("p2pstate/durable/writer.py", "p2pstate/data/chunks.py", "p2pstate/operator/command.py"),  # what is kept
}
FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve"}
FORBIDDEN_NAMES = {"recv_pyobj", "send_pyobj"}


@dataclass(frozen=True, slots=True)
class Import:
    path: str  # of the importing file, from the root
    line: int
    module: str  # dotted and absolute
    names: tuple[str, ...] = ()  # of `from module import names`, each a module or something in one

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


def imports_of(tree: ast.AST, path: str) -> list[Import]:
    """Every import in one file."""
    parts = path.removesuffix(".py").split("/")
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [Import(path, node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(parts[: len(parts) - node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            found.append(Import(path, node.lineno, module, tuple(alias.name for alias in node.names)))
    return found


def listed_modules(package: str, docstring: str) -> list[str]:
    """File names (from the package) in the order of the list; ValueError with a sentence if there is no list."""
    if BEGIN not in docstring or END not in docstring:
        raise ValueError(
            f"{package}/__init__.py: its docstring needs the list of its modules, one a line ('name.py  what it is'), "
            f"between the lines '{BEGIN}' and '{END}'"
        )
    block = docstring.split(BEGIN, 1)[1].split(END, 1)[0]
    names: list[str] = []
    for line in block.splitlines():
        for word in line.split():
            if not re.fullmatch(r"[\w/]+\.py", word):
                break
            names.append(word)
    return names


def order_of(package: str, listed: list[str], files: set[str]) -> dict[str, int]:
    """Position of every file (from the package); a subpackage's __init__.py is right below the last of its modules."""
    order = {name: 2 * position for position, name in enumerate(listed)}
    for name in sorted(files - set(order)):
        if name == "__init__.py":
            order[name] = 2 * len(listed)
        elif name.endswith("/__init__.py"):
            folder = name.removesuffix("__init__.py")
            order[name] = 1 + max((order[other] for other in listed if other.startswith(folder)), default=-2)
    missing = sorted(files - set(order))
    if missing:
        raise ValueError(f"{package}/__init__.py: the list of modules in its docstring lacks {', '.join(missing)}")
    surplus = sorted(set(listed) - files)
    if surplus:
        raise ValueError(f"{package}/__init__.py: its docstring lists files that do not exist: {', '.join(surplus)}")
    return order


def file_of(module: str, order: dict[str, int]) -> str | None:
    """The file (from the package) that a dotted module name stands for."""
    inner = module.split(".")[1:]
    candidates = ("/".join([*inner, "__init__"]) + ".py", "/".join(inner) + ".py")
    return next((name for name in candidates if name in order), None)


def upward_only(package: str, order: dict[str, int], imports: list[Import]) -> list[str]:
    """One sentence per import that goes down the list."""
    wrong = []
    for item in imports:
        if item.top != package:
            continue
        importer = item.path.split("/", 1)[1]
        targets = {file_of(f"{item.module}.{name}", order) or file_of(item.module, order) for name in item.names}
        for target in sorted((targets or {file_of(item.module, order)}) - {None, importer}):
            if order[target] > order[importer]:
                wrong.append(f"{item.path}:{item.line} imports {target}, which stands below it in the package's list")
    return wrong


@cache
def sources(package: str) -> dict[str, ast.Module]:
    folder = ROOT / package
    init = folder / "__init__.py"
    if not init.exists() or not init.read_text().strip():
        pytest.skip(f"{package} has no content yet")
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(), filename=str(path))
        for path in sorted(folder.rglob("*.py"))
    }


def all_imports(trees: dict[str, ast.Module]) -> list[Import]:
    return [item for path, tree in trees.items() for item in imports_of(tree, path)]


@pytest.mark.parametrize("package", PACKAGES)
def test_package_imports_go_upward_only(package: str) -> None:
    trees = sources(package)
    docstring = ast.get_docstring(trees[f"{package}/__init__.py"]) or ""
    files = {path.removeprefix(package + "/") for path in trees}
    order = order_of(package, listed_modules(package, docstring), files)
    wrong = upward_only(package, order, all_imports(trees))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", PACKAGES)
def test_package_never_unpickles(package: str) -> None:
    trees = sources(package)
    wrong = [f"{i.path}:{i.line} imports {i.module}" for i in all_imports(trees) if i.top in FORBIDDEN_MODULES]
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                loads_torch = node.attr == "load" and isinstance(node.value, ast.Name) and node.value.id == "torch"
                if node.attr in FORBIDDEN_NAMES or loads_torch:
                    wrong.append(f"{path}:{node.lineno} uses {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", PACKAGES)
def test_wall_clock_is_read_only_in_named_files(package: str) -> None:
    readers = {
        path
        for path, tree in sources(package).items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("time.time", "time.time_ns", "datetime.now")
    }
    assert readers == {path for path in MAY_READ_WALL_CLOCK if path.startswith(package)}


def test_rendezvous_never_imports_p2pstate() -> None:
    wrong = [f"{i.path}:{i.line}" for i in all_imports(sources("rendezvous")) if i.top == "p2pstate"]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", sorted(ONLY_IN))
def test_rendezvous_imports_heavy_module_only_in_named_files(module: str) -> None:
    allowed = ONLY_IN[module]
    items = all_imports(sources("rendezvous"))
    wrong = sorted({f"{i.path}:{i.line} imports {module}" for i in items if i.top == module and i.path not in allowed})
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", PACKAGES)
def test_package_is_marked_as_typed(package: str) -> None:
    sources(package)
    assert (ROOT / package / "py.typed").exists(), f"{package}/py.typed is missing (an empty file)"


# The checks above must be able to fail: small made-up packages, one fault each.


def judge(text: str, files: dict[str, str]) -> list[str]:
    trees = {f"pack/{name}": ast.parse(source) for name, source in files.items()}
    order = order_of("pack", listed_modules("pack", text), set(files))
    return upward_only("pack", order, all_imports(trees))


LAYOUT = f"{BEGIN}\n    a.py  b.py   two of them\n    sub/c.py\n    sub/d.py\n{END}\n"
FILES = {
    "__init__.py": "from pack.b import x",
    "a.py": "",
    "b.py": "",
    "sub/__init__.py": "",
    "sub/c.py": "",
    "sub/d.py": "",
}


def test_layout_with_imports_upward_passes() -> None:
    files = FILES | {"b.py": "from .a import y", "sub/c.py": "from ..b import x", "sub/__init__.py": "from .c import z"}
    files |= {"sub/d.py": "from pack.sub import c\nfrom . import c"}
    assert judge(LAYOUT, files) == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("a.py", "import pack.b"),
        ("a.py", "from pack import b"),
        ("a.py", "from . import b"),
        ("a.py", "from .b import x"),
        ("a.py", "def late():\n    from pack.b import x"),
        ("b.py", "from pack.sub import z"),
        ("b.py", "from pack import x"),
        ("sub/c.py", "from pack.sub import z"),
    ],
)
def test_layout_with_an_import_downward_is_named(name: str, source: str) -> None:
    assert len(judge(LAYOUT, FILES | {name: source})) >= 1


def test_layout_without_a_list_says_what_to_add() -> None:
    with pytest.raises(ValueError, match="needs the list of its modules"):
        listed_modules("pack", "Just prose.")


def test_layout_that_lacks_a_file_names_it() -> None:
    with pytest.raises(ValueError, match=r"lacks e\.py"):
        judge(LAYOUT, FILES | {"e.py": ""})


def test_layout_that_lists_a_missing_file_names_it() -> None:
    with pytest.raises(ValueError, match=r"do not exist: b\.py"):
        judge(LAYOUT, {name: source for name, source in FILES.items() if name != "b.py"})
