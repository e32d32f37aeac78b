"""A save whose writer is SIGKILLed at any point leaves the checkpoint before it the newest, and the next save works."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from durable_site import HOME, NODES, PLACES, Site, matrix
from fsspec.registry import register_implementation
from object_store import ObjectStore
from torch.distributed.checkpoint import filesystem

from p2pstate.durable import dcp_write, publish, writer
from p2pstate.durable.catalog import damaged_files, list_checkpoints
from p2pstate.durable.dcp_read import Reader
from p2pstate.durable.division import divide_version
from p2pstate.durable.manifest import METADATA
from p2pstate.durable.remote import open_storage
from p2pstate.durable.storage import Directory
from p2pstate.types import Version

KEEP = 1


def die(*args: Any, **kwargs: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def before(name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    """A call that is given a source of this name does not come back."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return die() if any(str(arg).endswith(name) for arg in args) else stock(*args, **kwargs)

    return call


def second_call(stock: Callable[..., Any]) -> Callable[..., Any]:
    calls = iter([stock])
    return lambda *args, **kwargs: next(calls, die)(*args, **kwargs)


UPLOADS = {"before an upload": (ObjectStore, "put_file", die)}
# Where the process dies: what is replaced there, by what. Only the lead (place 0) comes to the last three.
POINTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "before write": (dcp_write.FileSystemWriter, "write_data", die),
    "mid-file": (filesystem, "_write_item", second_call(filesystem._write_item)),
    "after write, before its table": (dcp_write, "_store_table", die),
    "after all wrote": (writer, "publish_checkpoint", die),
    "before the marker": (publish, "_store_as_is", before(METADATA, publish._store_as_is)),
    "between marker and retention": (writer, "to_delete", die),
}
LEAD_ONLY = ("after all wrote", "before the marker", "between marker and retention")


def in_child(work: Callable[[], None]) -> int:
    """Runs it in a process that may die; returns the wait status."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


def save(site: Site, root: str, version: Version, patch: pytest.MonkeyPatch, point: str = "", place: int = -1) -> bool:
    """A save as the agents run it, each step in a process; False when one died."""
    records = [r for vault in site.vaults for r in vault.records() if r.version == version]
    shares = divide_version(HOME, records)
    assert not isinstance(shares, str)
    own = writer._Writer()
    name = own.begin(serial=0, where=[root, ""], step=version.step, failed=[], newest="")["name"]
    read_end, write_end = os.pipe()

    def step(at: int, work: Callable[[], Any]) -> bool:
        def armed() -> None:
            if at == place:
                patch.setattr(*{**POINTS, **UPLOADS}[point])
            os.write(write_end, f"{at}:{work() or ''}\n".encode())

        return os.WIFEXITED(in_child(armed))

    def write(at: int) -> str:
        process = writer._Writer()
        for share in shares[NODES[at]]:
            fd = site.vaults[at].open(share.slot)
            assert fd is not None
            process.slots[share.slot] = os.dup(fd)
        given = [share.pack() for share in shares[NODES[at]]]
        where = {"where": [root, ""], "name": name, "place": at, "node": NODES[at], "num_ranks": len(PLACES)}
        digest: str = process.write(serial=1, version=list(version), shares=given, **where)["digest"]
        return digest

    try:
        if not all(step(at, lambda at=at: write(at)) for at in range(len(NODES))):
            return False
        lines = os.read(read_end, 1 << 16).decode().split()
        digests = [[int(at), digest] for at, digest in (line.split(":") for line in lines)]
        what = {
            "run": ["run", "nonce"],
            "version": list(version),
            "world_size": len(PLACES),
            "reason": "test",
        }
        older = {"run": what["run"], "keep": KEEP, "first": name, "damaged": []}
        return step(
            0, lambda: own.publish(serial=2, where=[root, ""], name=name, digests=digests, **what) and ""
        ) and step(0, lambda: own.retain(serial=3, where=[root, ""], **older) and "")
    finally:
        os.close(read_end)
        os.close(write_end)


@pytest.mark.parametrize(("point", "place"), [(p, n) for p in POINTS for n in (0, 1) if n == 0 or p not in LEAD_ONLY])
def test_writer_killed_at_a_point_costs_this_save_only(
    point: str, place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_kill(point, place, str(tmp_path), monkeypatch)


@pytest.mark.parametrize(("point", "place"), [("mid-file", 1), ("before an upload", 0), ("before the marker", 0)])
def test_writer_killed_on_its_way_to_object_storage_costs_this_save_only(
    point: str, place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    register_implementation("objects", ObjectStore, clobber=True)
    check_kill(point, place, f"objects://{tmp_path}/bucket/run", monkeypatch)
    (stage,) = tmp_path.glob("p2pstate-stage-*/*")
    assert len(list(stage.iterdir())) == 1, "the stage keeps one save"


def check_kill(point: str, place: int, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    site, storage = Site(), open_storage(root)
    assert save(site, root, site.capture(10), monkeypatch)
    assert not save(site, root, site.capture(20), monkeypatch, point, place)

    published = point == "between marker and retention"
    complete = [found for found in list_checkpoints(storage) if not found.problem]
    assert [found.step for found in complete] == ([20, 10] if published else [10])
    assert all(damaged_files(found) == [] for found in complete)

    assert save(site, root, site.capture(30), monkeypatch)
    (left,) = list_checkpoints(storage)  # the one that was kept is gone now, and so is what was interrupted
    assert left.step == 30
    assert damaged_files(left) == []
    reader = Reader(left)
    assert torch.equal(reader.read({"w": reader.whole("model.w")})["w"], matrix(30))


def begun(own: writer._Writer, root: str) -> list[str]:
    """Names of three saves, of steps 10, 20 and 30."""
    new = {"serial": 0, "where": [root, ""], "failed": [], "newest": ""}
    return [own.begin(step=step, **new)["name"] for step in (10, 20, 30)]


def test_what_failed_saves_have_left_goes_before_the_next_begins(tmp_path: Path) -> None:
    site, root, own = Site(), str(tmp_path), writer._Writer()
    good, torn, gone = begun(own, root)
    site.save(tmp_path / good, site.capture(10))
    site.write(tmp_path / torn, site.capture(20))
    (tmp_path / gone).rmdir()
    name = own.begin(serial=1, where=[root, ""], step=40, failed=[good, torn, gone], newest="")["name"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [good, name], "a complete one is none that failed"


def test_save_that_was_found_damaged_is_none_of_those_to_keep(tmp_path: Path) -> None:
    site, root, own = Site(), str(tmp_path), writer._Writer()
    good, damaged, newest = begun(own, root)
    site.save(tmp_path / good, site.capture(10))
    site.save(tmp_path / damaged, site.capture(20))
    site.save(tmp_path / newest, site.capture(30))
    older = {"run": ["run", "nonce"], "keep": 2, "first": good, "damaged": [damaged]}
    assert own.retain(serial=1, where=[root, ""], **older) == {"problem": ""}
    assert [found.step for found in list_checkpoints(Directory(tmp_path))] == [30, 10]
