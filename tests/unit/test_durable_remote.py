"""durable/remote: checkpoints by URL, on object storage that fails in every way."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from durable_site import Site, matrix, publish_to, values
from fsspec.registry import register_implementation
from object_store import ObjectStore
from safetensors.torch import load_file
from test_durable_catalog import resolve_on
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

from p2pstate.cli import main
from p2pstate.durable.catalog import damaged_files, list_checkpoints
from p2pstate.durable.manifest import METADATA
from p2pstate.durable.remote import RemoteStorage, open_storage
from p2pstate.durable.resume import load
from p2pstate.durable.storage import Directory
from p2pstate.durable.writer import _Writer
from p2pstate.replicator import _policy
from p2pstate.types import Version

NAMES = ("000001-step10", "000002-step20")


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of two complete checkpoints; what they were staged in is below ``stage``."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "stage"))
    register_implementation("objects", ObjectStore, clobber=True)
    where, site = f"objects://{tmp_path}/bucket/run", Site()
    for name, step in zip(NAMES, (10, 20), strict=True):
        save(where, name, site, step)
    return where


def save(url: str, name: str, site: Site, step: int) -> None:
    storage, version = open_storage(url), site.capture(step)
    storage.begin(name)
    publish_to(storage, name, site.write_to(storage, name, version), version)


def fault(url: str, what: str) -> None:
    (Path(url.removeprefix("objects://")) / "FAULT").write_text(what)


def bucket(url: str, name: str) -> Path:
    return Path(url.removeprefix("objects://")) / name


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_stage_keeps_the_newest_save_only_and_is_no_place_to_resume_from_alone(url: str, tmp_path: Path) -> None:
    (stage,) = (tmp_path / "stage").glob("*/*")
    assert [path.name for path in stage.iterdir()] == [NAMES[1]]
    shutil.rmtree(bucket(url, NAMES[1]))
    found = resolve_on(open_storage(url), 2)
    assert found.choice is not None
    assert found.choice.step == 10


@pytest.mark.parametrize("staged", ["same", "damaged", "gone"])
def test_every_rank_gets_back_what_it_had_whatever_became_of_the_stage(staged: str, url: str, tmp_path: Path) -> None:
    (stage,) = (tmp_path / "stage").glob(f"*/*/{NAMES[1]}")
    if staged == "gone":
        shutil.rmtree(stage)
    if staged == "damaged":
        for path in stage.iterdir():
            flip(path)
    found = resolve_on(open_storage(url), 3)
    assert found.choice is not None
    assert (found.choice.step, found.choice.path, found.skipped) == (20, f"{url}/{NAMES[1]}", ())
    for rank, (begin, end) in enumerate([(0, 3), (3, 6), (6, 9), (9, 10)]):
        leaves, plain = load(found.choice, rank)
        assert plain == values(rank, 20)
        assert torch.equal(leaves["model/w"], matrix(20)[begin:end])
        assert torch.equal(leaves["optimizer/model/w/exp_avg"], matrix(20)[begin:end] * 2)


def test_files_of_the_stage_are_read_instead_of_those_on_storage(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = list_checkpoints(open_storage(url))[0]
    monkeypatch.setattr(RemoteStorage, "open", lambda self, save, name: pytest.fail(f"{name} was read from storage"))
    assert load(newest, 1)[1] == values(1, 20)


def test_bytes_damaged_on_storage_are_found_although_the_stage_has_the_right_ones(url: str) -> None:
    flip(bucket(url, NAMES[1]) / "__1_0.distcp")
    found = resolve_on(open_storage(url), 2)
    assert found.choice is not None
    assert found.choice.step == 10
    assert "__1_0.distcp is damaged" in found.skipped[0]


def test_stock_pytorch_reads_it_from_its_url(url: str) -> None:
    target = {"model": {"w": torch.zeros(10, 4)}}
    dcp.load(target, storage_reader=FsspecReader(f"{url}/{NAMES[1]}"))
    assert torch.equal(target["model"]["w"], matrix(20))


@pytest.mark.parametrize(
    ("what", "sentence"),
    [("gone", "Refused: the endpoint"), ("short", "reads differently"), ("flipped", "reads differently")],
)
def test_save_that_storage_did_not_take_as_it_is_becomes_no_checkpoint(what: str, sentence: str, url: str) -> None:
    site = Site()
    fault(url, what)
    with pytest.raises(OSError, match=sentence):
        save(url, "000003-step30", site, 30)
    fault(url, "")
    assert [each.step for each in list_checkpoints(open_storage(url)) if not each.problem] == [20, 10]
    save(url, "000004-step30", site, 30)
    newest = list_checkpoints(open_storage(url))[0]
    assert (newest.step, newest.problem, damaged_files(newest)) == (30, "", [])


def test_marker_that_storage_cut_short_is_no_checkpoint(url: str) -> None:
    marker = bucket(url, NAMES[1]) / METADATA
    marker.write_bytes(marker.read_bytes()[:100])
    found = resolve_on(open_storage(url), 2)
    assert found.choice is not None
    assert found.choice.step == 10


def test_lists_that_are_behind_cost_no_checkpoint(url: str) -> None:
    """Storage shows in its lists what has come to be only seconds later; files are there for who names them."""
    above = url.rpartition("/")[0]
    fault(above, f"lists {time.time()}")
    own, where = _Writer(), [url, ""]
    third = own.begin(serial=0, where=where, step=30, failed=[], newest=NAMES[1])["name"]
    site = Site()
    publish_to(open_storage(url), third, site.write_to(open_storage(url), third, site.capture(30)), Version(1, 30))
    assert not any(third == each.name for each in list_checkpoints(open_storage(url)))
    with pytest.raises(FileExistsError, match=third):
        open_storage(url).begin(third)
    fourth = own.begin(serial=1, where=where, step=40, failed=[third], newest=third)["name"]
    fault(above, "")
    assert fourth == "000004-step40", "a serial of its own"
    assert [each.name for each in list_checkpoints(open_storage(url)) if not each.problem] == [third, *NAMES[::-1]]


def test_commands_take_a_url(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", url, "list", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["path"] for row in rows] == [f"{url}/{name}" for name in reversed(NAMES)]
    assert main(["checkpoints", url, "verify"]) == 0
    assert main(["checkpoints", url, "show", NAMES[0]]) == 0
    assert "model.w  float32 [10, 4]" in capsys.readouterr().out
    assert main(["export", url, str(tmp_path / "weights.safetensors")]) == 0
    assert torch.equal(load_file(tmp_path / "weights.safetensors")["w"], matrix(20))
    assert main(["checkpoints", url, "delete", NAMES[0]]) == 0
    assert [each.name for each in list_checkpoints(open_storage(url))] == [NAMES[1]]
    fault(url, "gone")
    assert main(["checkpoints", url]) == 1
    assert f"{url}: Refused: the endpoint does not answer" in capsys.readouterr().err


def test_what_cannot_be_opened_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["checkpoints", "nosuch://bucket/run"]) == 1
    assert "Protocol not known: nosuch" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    assert main(["checkpoints", "s3://bucket/run"]) == 1
    assert "pip install 'p2pstate[fsspec]'" in capsys.readouterr().err


def test_file_url_is_a_directory(tmp_path: Path) -> None:
    assert open_storage(f"file://{tmp_path}") == open_storage(f"local://{tmp_path}") == Directory(tmp_path)


def test_tilde_is_the_home_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_storage("~/ck") == open_storage("file://~/ck") == Directory(tmp_path / "ck")
    policy = _policy("~/ck", 10, 2, Path("~/stage"))
    assert (policy.path, policy.stage) == (str(tmp_path / "ck"), str(tmp_path / "stage"))
    with pytest.raises(ValueError, match=r"no user of that name has a home here; for .* write \./~noone-at-all/ck"):
        open_storage("~noone-at-all/ck")
