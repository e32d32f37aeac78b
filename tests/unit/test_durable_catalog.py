"""durable/catalog and resume: which checkpoint is taken, which are skipped and why, which may go."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from durable_site import Site
from torch.distributed import HashStore

from p2pstate.durable.catalog import damaged_files, delete, list_checkpoints, next_name, to_delete
from p2pstate.durable.manifest import MANIFEST, METADATA, Damaged, Manifest
from p2pstate.durable.resume import Resolved, resolve
from p2pstate.durable.storage import Directory, Storage
from p2pstate.errors import ConfigError

DEADLINE_S = 30.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three complete checkpoints, of steps 10, 20 and 30."""
    site = Site()
    for serial, step in enumerate((10, 20, 30), start=1):
        site.save(tmp_path / f"{serial:06d}-step{step}", site.capture(step))
    return tmp_path


def resolve_on(storage: Storage, num_ranks: int) -> Resolved:
    store, found = HashStore(), []
    ranks = [
        threading.Thread(target=lambda rank=rank: found.append(resolve(store, storage, rank, num_ranks, 20.0)))
        for rank in range(num_ranks)
    ]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(30.0)
    assert len(found) == num_ranks
    assert all(each == found[0] for each in found), "all ranks decide alike"
    return found[0]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)


def pipe(path: Path) -> None:
    """Whoever opens it to read waits for ever."""
    path.unlink()
    os.mkfifo(path)


def swap(one: Path, other: Path) -> None:
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no marker": (lambda d: (d / METADATA).unlink(), "was not published"),
    "no manifest": (lambda d: (d / MANIFEST).unlink(), "is missing"),
    "nothing but data": (lambda d: [(d / n).unlink() for n in (METADATA, MANIFEST)], "interrupted before"),
    "data missing": (lambda d: (d / "__1_0.distcp").unlink(), "__1_0.distcp is missing"),
    "data truncated": (lambda d: truncate(d / "__0_0.distcp"), "__0_0.distcp has"),
    "data flipped": (lambda d: flip(d / "__0_0.distcp"), "__0_0.distcp is damaged"),
    "data of two nodes swapped": (lambda d: swap(d / "__0_0.distcp", d / "__1_0.distcp"), "__0_0.distcp has"),
    "data of another checkpoint": (
        lambda d: (d / "__0_0.distcp").write_bytes((d.parent / "000002-step20" / "__0_0.distcp").read_bytes()),
        "__0_0.distcp is damaged",
    ),
    "marker flipped": (lambda d: flip(d / METADATA), ".metadata is damaged"),
    "marker truncated": (lambda d: truncate(d / METADATA), ".metadata has"),
    "manifest flipped": (lambda d: flip(d / MANIFEST), "p2pstate.manifest is damaged"),
    "manifest truncated": (lambda d: truncate(d / MANIFEST), "p2pstate.manifest is damaged"),
    "data is a pipe": (lambda d: pipe(d / "__0_0.distcp"), "__0_0.distcp is missing"),
    "manifest is a pipe": (lambda d: pipe(d / MANIFEST), "is missing"),
    "link that leads nowhere": (lambda d: (d.rename(d.with_name("away")), d.symlink_to("gone")), "cannot be read"),
    "link to itself": (lambda d: (d.rename(d.with_name("away")), d.symlink_to(d.name)), "cannot be read"),
    "empty": (lambda d: [path.unlink() for path in d.iterdir()], "interrupted before"),
}


@pytest.mark.parametrize("damage", sorted(DAMAGE))
def test_damaged_checkpoint_is_named_and_the_one_before_is_taken(damage: str, root: Path) -> None:
    harm, sentence = DAMAGE[damage]
    harm(root / "000003-step30")
    found = resolve_on(Directory(root), 3)
    assert found.choice is not None
    assert found.choice.step == 20
    (skipped,) = found.skipped
    assert skipped.startswith("000003-step30: ")
    assert sentence in skipped


def test_files_swapped_between_two_checkpoints_make_both_damaged(root: Path) -> None:
    sizes = {(root / name / "__1_0.distcp").stat().st_size for name in ("000002-step20", "000003-step30")}
    assert len(sizes) == 1
    swap(root / "000003-step30" / "__1_0.distcp", root / "000002-step20" / "__1_0.distcp")
    found = resolve_on(Directory(root), 2)
    assert found.choice is not None
    assert found.choice.step == 10
    assert found.damaged == ("000003-step30", "000002-step20")
    verified = [damaged_files(each) for each in list_checkpoints(Directory(root))]
    assert verified == [["__1_0.distcp is damaged: its digest is not that of what was written"]] * 2 + [[]]


def test_two_damaged_checkpoints_leave_the_third(root: Path) -> None:
    flip(root / "000003-step30" / "__0_0.distcp")
    (root / "000002-step20" / METADATA).unlink()
    found = resolve_on(Directory(root), 2)
    assert found.choice is not None
    assert found.choice.step == 10
    assert [sentence[:6] for sentence in found.skipped] == ["000002", "000003"]


def test_nothing_usable_is_said_with_every_reason(root: Path) -> None:
    for path in root.iterdir():
        flip(path / "__0_0.distcp")
    found = resolve_on(Directory(root), 2)
    assert found.choice is None
    assert len(found.skipped) == 3


def test_directory_that_does_not_exist_has_no_checkpoint(tmp_path: Path) -> None:
    assert resolve_on(Directory(tmp_path / "nowhere"), 2) == Resolved(None, ())


def test_directory_that_cannot_be_read_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    file, dangling = tmp_path / "file", tmp_path / "dangling"
    file.write_text("")
    dangling.symlink_to("not mounted")
    for path in (file, dangling):
        with pytest.raises(ConfigError, match="cannot be read"):
            resolve(HashStore(), Directory(path), 0, 1, 5.0)


@pytest.mark.parametrize("hangs_at", ["the list", "the content"])
def test_storage_that_hangs_is_waited_for_aloud_and_ends_all_ranks_in_time(
    hangs_at: str, root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("p2pstate.durable.patience.FIRST_SAID_S", 0.05)
    answers = threading.Event()

    class Hanging(Directory):
        def saves(self) -> list[str]:
            if hangs_at == "the list":
                answers.wait(DEADLINE_S)
            return super().saves()

        def open(self, save: str, name: str) -> BinaryIO:
            if hangs_at == "the content" and name == METADATA:  # which is one of the ranks' to read
                answers.wait(DEADLINE_S)
            return super().open(save, name)

    store, said = HashStore(), []

    def rank_says(rank: int) -> None:
        try:
            resolve(store, Hanging(root), rank, 2, 0.3)
        except ConfigError as error:
            said.append(str(error))

    ranks = [threading.Thread(target=rank_says, args=(rank,)) for rank in range(2)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(DEADLINE_S)
    answers.set()
    assert len(said) == 2
    assert all(f"cannot be read ({hangs_at} of " in each and " did not come within " in each for each in said)
    assert f"p2pstate: waiting for {hangs_at} of" in capfd.readouterr().err


def test_saves_none_of_which_can_be_read_are_an_error_and_not_a_fresh_start(root: Path) -> None:
    for path in list(root.iterdir()):
        path.rename(root.with_name(path.name))
        path.symlink_to("not mounted")
    with pytest.raises(ConfigError, match="000002-step20 cannot be read: No such file"):
        resolve(HashStore(), Directory(root), 0, 1, 5.0)


def test_save_that_is_a_link_is_used_and_deleting_it_removes_the_link_alone(root: Path) -> None:
    path, away = root / "000001-step10", root.with_name("cold")
    path.rename(away)
    path.symlink_to(away)
    oldest = list_checkpoints(Directory(root))[-1]
    assert damaged_files(oldest) == []
    delete(oldest)
    assert sorted(each.name for each in root.iterdir()) == ["000002-step20", "000003-step30"]
    assert (away / METADATA).exists()


def test_foreign_entries_are_left_alone(root: Path) -> None:
    (root / "notes.txt").write_text("mine")
    (root / "step40").mkdir()
    assert [found.step for found in list_checkpoints(Directory(root))] == [30, 20, 10]


def test_newest_is_what_was_saved_last_whatever_its_step(root: Path) -> None:
    """A run that went back saves lower steps again: the serial counts."""
    name = next_name(Directory(root), 15)
    assert name == "000004-step15"
    site = Site()
    site.save(root / name, site.capture(15))
    found = resolve_on(Directory(root), 1)
    assert found.choice is not None
    assert found.choice.step == 15


def names(root: Path, keep: int, first: str = "000001-step10") -> list[str]:
    """``first``: the first save of the run that deletes."""
    return [found.name for found in to_delete(list_checkpoints(Directory(root)), keep, ("run", "nonce"), first)]


def test_retention_keeps_the_newest_complete_ones(root: Path) -> None:
    assert names(root, 3) == []
    assert names(root, 2) == ["000001-step10"]
    assert names(root, 1) == ["000002-step20", "000001-step10"]


def test_retention_never_counts_what_is_not_complete(root: Path) -> None:
    (root / "000003-step30" / METADATA).unlink()
    assert names(root, 2) == []
    assert names(root, 1) == ["000001-step10"]
    (root / "000002-step20" / METADATA).unlink()
    assert names(root, 1) == [], "the last good one"
    (root / "000001-step10" / METADATA).unlink()
    assert names(root, 1) == []


def test_retention_leaves_alone_what_another_run_writes_at_the_same_time(root: Path) -> None:
    path = root / "000002-step20" / MANIFEST
    path.write_bytes(replace(Manifest.unpack(path.read_bytes()), run=("other", "nonce")).pack())
    (root / "000002-step21").mkdir()  # theirs or ours, under way or given up: nobody knows
    assert names(root, 1) == ["000001-step10"]
    assert names(root, 1, first="000003-step30") == ["000002-step21", "000002-step20", "000001-step10"], (
        "it was before us"
    )


def test_retention_removes_older_interrupted_saves_and_no_newer_one(root: Path) -> None:
    (root / "000002-step20" / METADATA).unlink()
    (root / "000004-step40").mkdir()  # may be under way
    assert names(root, 2) == ["000002-step20"]


def test_retention_keeps_damaged_ones_while_there_are_too_few_good_ones(root: Path) -> None:
    truncate(root / "000002-step20" / "__0_0.distcp")
    assert names(root, 3) == []
    assert names(root, 2) == ["000002-step20"]
    assert names(root, 1) == ["000002-step20", "000001-step10"]


def test_deleting_begins_with_the_marker(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = list_checkpoints(Directory(root))[0]

    def crash(path: Path) -> None:
        raise OSError("killed here")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", crash)
        with pytest.raises(OSError, match="killed here"):
            delete(found)
    assert list_checkpoints(Directory(root))[0].interrupted
    delete(found)
    assert [each.step for each in list_checkpoints(Directory(root))] == [20, 10]


def test_checkpoint_that_is_deleted_while_all_are_listed_is_passed_over(root: Path) -> None:
    class Deleting(Directory):
        def open(self, save: str, name: str) -> BinaryIO:
            if save == "000002-step20":
                self.delete(save, METADATA)
            return super().open(save, name)

    found = list_checkpoints(Deleting(root))
    assert [each.step for each in found if not each.problem] == [30, 10]
    assert len(found) == 2
    for _ in range(2):  # two may delete the same
        delete(found[0])
    assert [each.step for each in list_checkpoints(Directory(root))] == [10]


@pytest.mark.parametrize("cut", [0, 1, 15, 16, 40, -1])
def test_manifest_cut_anywhere_is_damaged(cut: int, root: Path) -> None:
    content = (root / "000001-step10" / MANIFEST).read_bytes()
    assert Manifest.unpack(content).version.step == 10
    with pytest.raises(Damaged):
        Manifest.unpack(content[:cut])
