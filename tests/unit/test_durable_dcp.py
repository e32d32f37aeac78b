"""durable/dcp_write and dcp_read: slots on their way to disk and back, also by stock PyTorch."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from durable_site import HOME, Site, at, bias, matrix, mean, publish, values

from p2pstate.durable.catalog import damaged_files
from p2pstate.durable.dcp_read import Reader, Wanted
from p2pstate.durable.dcp_write import SaveFailed, write_shares
from p2pstate.durable.division import divide_version
from p2pstate.durable.manifest import METADATA
from p2pstate.durable.resume import load
from p2pstate.durable.storage import Directory
from p2pstate.types import Version


def test_checkpoint_is_read_by_stock_pytorch_under_its_own_names(tmp_path: Path) -> None:
    site = Site()
    site.save(tmp_path, site.capture(7))
    target = {
        "model": {name: torch.zeros(10, 4) for name in ("w", "head.w")}
        | {name: torch.zeros(5, dtype=torch.bfloat16) for name in ("bias", "alias")}
        | {"norm.mean": torch.zeros(2)},
        "optimizer": {
            "state": {"w": {"exp_avg": torch.zeros(10, 4), "step": torch.tensor(0.0)}},
            "param_groups": [{"lr": 0.0, "betas": None, "params": []}],
        },
        "p2pstate": {"rank3": {"model": {"norm.mean": torch.zeros(2)}, "values": torch.zeros(1, dtype=torch.uint8)}},
    }
    target["p2pstate"]["rank3"]["values"] = torch.zeros(len(values(3, 7)), dtype=torch.uint8)
    dcp.load(target, checkpoint_id=tmp_path)
    for name in ("w", "head.w"):
        assert torch.equal(target["model"][name], matrix(7))
    for name in ("bias", "alias"):
        assert torch.equal(target["model"][name], bias(7))
    assert torch.equal(target["model"]["norm.mean"], mean(0, 7)), "under the plain name it is the first rank's"
    assert torch.equal(target["optimizer"]["state"]["w"]["exp_avg"], matrix(7) * 2)
    assert target["optimizer"]["state"]["w"]["step"] == 7
    assert target["optimizer"]["param_groups"] == [{"lr": 0.5, "betas": (0.9, 0.99), "params": ["w"]}]
    assert torch.equal(target["p2pstate"]["rank3"]["model"]["norm.mean"], mean(3, 7))
    assert target["p2pstate"]["rank3"]["values"].numpy().tobytes() == values(3, 7)


def test_checkpoint_becomes_one_file_with_the_stock_tool_and_without_p2pstate(tmp_path: Path) -> None:
    site = Site()
    site.save(tmp_path / "ck", site.capture(3))
    script = (
        "import sys, torch\n"
        "from torch.distributed.checkpoint.format_utils import dcp_to_torch_save\n"
        f"dcp_to_torch_save({str(tmp_path / 'ck')!r}, {str(tmp_path / 'one.pt')!r})\n"
        f"state = torch.load({str(tmp_path / 'one.pt')!r})\n"
        "assert state['model']['w'].sum() == 40 * 300 + 780, state['model']['w']\n"
        "assert sorted(state['p2pstate']) == ['rank0', 'rank1', 'rank2', 'rank3']\n"
        "assert not any(name.startswith('p2pstate') for name in sys.modules)\n"
    )
    alone = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # torch would load our plug-in
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path, env=alone)


def test_every_rank_gets_back_exactly_what_it_had(tmp_path: Path) -> None:
    site = Site()
    site.save(tmp_path, site.capture(4))
    for rank, (begin, end) in enumerate([(0, 3), (3, 6), (6, 9), (9, 10)]):
        leaves, plain = load(at(tmp_path), rank)
        assert plain == values(rank, 4)
        assert sorted(leaves) == [
            "model/bias",
            "model/norm.mean",
            "model/w",
            "optimizer/model/w/exp_avg",
            "optimizer/model/w/step",
        ]
        assert torch.equal(leaves["model/w"], matrix(4)[begin:end])
        assert torch.equal(leaves["model/bias"], bias(4))
        assert torch.equal(leaves["model/norm.mean"], mean(rank, 4))


def test_parts_are_read_as_they_are_asked_for(tmp_path: Path) -> None:
    site = Site()
    site.save(tmp_path, site.capture(1))
    reader = Reader(at(tmp_path))
    found = reader.read({"middle": Wanted("model.w", (2, 1), (6, 2)), "nothing": Wanted("model.w", (10, 0), (0, 4))})
    assert torch.equal(found["middle"], matrix(1)[2:8, 1:3])
    assert found["nothing"].shape == (0, 4)
    with pytest.raises(ValueError, match="not all of it is there"):
        reader.read({"beyond": Wanted("model.w", (8, 0), (3, 4))})


def test_what_all_ranks_hold_is_written_once(tmp_path: Path) -> None:
    site = Site()
    manifest = site.save(tmp_path, site.capture(2))
    state = Reader(at(tmp_path))._metadata
    stored = {}
    for index, where in state.storage_data.items():
        stored.setdefault((where.relative_path, where.offset), []).append(index.fqn)
    biases = [names for names in stored.values() if "model.bias" in names]
    assert biases == [["model.bias", "model.alias"]]
    assert sum(1 for name in manifest.files if name.endswith(".distcp")) >= 2, "all nodes write"


def test_slot_with_a_flipped_bit_is_not_written(tmp_path: Path) -> None:
    site = Site()
    version = site.capture(5)
    record = next(r for r in site.vaults[1].records() if r.version == version and r.part.kind == "own")
    site.slot(1, record.slot).body()[8] ^= 1
    with pytest.raises(SaveFailed, match="does not match its digest"):
        site.write(tmp_path, version)


def test_slot_that_was_written_over_meanwhile_is_not_written(tmp_path: Path) -> None:
    site = Site()
    old = site.capture(5)
    shares = divide_version(HOME, [r for vault in site.vaults for r in vault.records() if r.version == old])
    assert not isinstance(shares, str)
    given = [(share, site.slot(0, share.slot)) for share in shares["n0"]]
    site.capture(7, keep=site.capture(6, keep=old))
    with pytest.raises(SaveFailed, match="does not hold it"):
        write_shares(Directory(tmp_path.parent), tmp_path.name, 0, "n0", old, len(HOME), given)


def test_version_that_is_set_aside_outlives_those_after_it(tmp_path: Path) -> None:
    site = Site(reserve=True)
    aside = site.capture(1, set_aside=True)
    kept = aside
    for step in range(2, 7):
        kept = site.capture(step, keep=kept)
    site.save(tmp_path / "first", aside)
    second = site.capture(7, keep=kept, set_aside=True)
    kept = second
    for step in range(8, 12):
        kept = site.capture(step, keep=kept)
    site.save(tmp_path / "second", second)
    assert torch.equal(Reader(at(tmp_path / "second")).read({"w": Wanted("model.w", (0, 0), (10, 4))})["w"], matrix(7))
    assert all(record.slot for vault in site.vaults for record in vault.records())
    num_slots = [sum(1 for r in vault.records() if r.part.kind == "own") for vault in site.vaults]
    assert num_slots == [6, 6], "one more slot per part, not one per save"


def test_saves_leave_no_memory_descriptors_or_threads_behind(tmp_path: Path) -> None:
    site = Site(reserve=True)
    kept: Version | None = None
    used = []
    for step in range(1, 13):
        aside = site.capture(2 * step, keep=kept, set_aside=True)
        kept = site.capture(2 * step + 1, keep=aside)
        site.save(tmp_path / str(step), aside)
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count("memfd:p2pstate")
        used.append((maps, len(os.listdir("/proc/self/fd")), threading.active_count()))
    assert len(set(used[3:])) == 1, used


def test_checkpoint_is_not_published_when_a_file_is_short_or_missing(tmp_path: Path) -> None:
    site = Site()
    version = site.capture(1)
    digests = site.write(tmp_path / "short", version)
    with open(tmp_path / "short" / "__1_0.distcp", "r+b") as file:
        file.truncate(100)
    with pytest.raises(SaveFailed, match="has 100 bytes"):
        publish(tmp_path / "short", digests, version)
    digests = site.write(tmp_path / "elsewhere", version)
    (tmp_path / "elsewhere" / "p2pstate.part1").unlink()
    with pytest.raises(SaveFailed, match="storage that all nodes share"):
        publish(tmp_path / "elsewhere", digests, version)
    for name in ("short", "elsewhere"):
        assert not (tmp_path / name / METADATA).exists()


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", METADATA])
def test_flipped_bit_on_disk_is_found_and_named(name: str, tmp_path: Path) -> None:
    site = Site()
    site.save(tmp_path, site.capture(1))
    assert damaged_files(at(tmp_path)) == []
    content = bytearray((tmp_path / name).read_bytes())
    content[len(content) // 2] ^= 4
    (tmp_path / name).write_bytes(content)
    found = at(tmp_path)
    assert found.problem == ""
    (problem,) = damaged_files(found)
    assert problem.startswith(f"{name} is damaged")


def test_marker_appears_once_everything_outlives_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is synced after its last byte, a name after its file, and the marker's name comes after all others."""
    site, root = Site(), tmp_path / "000001-step10"
    synced: list[str] = []
    stock_sync, stock_replace = os.fsync, os.replace

    def fsync(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        synced.append(f"{path.name} {path.stat().st_size if path.is_file() else ''}".strip())
        stock_sync(fd)

    def replace(source: Path, target: Path) -> None:
        if target.name == METADATA:
            synced.append("marker")
        stock_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    site.save(root, site.capture(10))

    before, after = synced[: synced.index("marker")], synced[synced.index("marker") + 1 :]
    files = {f"{path.name} {path.stat().st_size}" for path in root.iterdir()}
    assert len(files) >= 4, "of each node, manifest and marker"
    assert files <= set(before)
    data = [before.index(name) for name in files if not name.startswith(METADATA)]
    assert before.index(root.name) > max(data), "their names, once they are what they are"
    assert after == [root.name]
