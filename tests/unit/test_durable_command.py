"""``p2pstate checkpoints`` and ``p2pstate export``, as a person calls them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from durable_site import Site, bias, matrix, mean
from safetensors import safe_open
from safetensors.torch import load_file

from p2pstate.cli import main
from p2pstate.durable.manifest import MANIFEST, METADATA
from p2pstate.durable.storage import Directory


@pytest.fixture
def root(tmp_path: Path) -> Path:
    site = Site()
    for serial, step in enumerate((10, 20), start=1):
        site.save(tmp_path / "ck" / f"{serial:06d}-step{step}", site.capture(step))
    (tmp_path / "ck" / "000003-step30").mkdir()
    return tmp_path / "ck"


def test_list_tells_what_is_there_and_why_something_is_not_usable(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoints", str(root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["000003-step30", "not", "usable:"]
    assert "step 20, 4 ranks" in lines[1]
    assert main(["checkpoints", str(root), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["step"], row["complete"], row["num_ranks"]) for row in rows] == [
        (30, False, None),
        (20, True, 4),
        (10, True, 4),
    ]


@pytest.mark.parametrize("at", range(4))
def test_json_may_stand_anywhere(at: int, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(root), "verify", "000001-step10"]
    assert main(["checkpoints", *words[:at], "--json", *words[at:]]) == 0
    assert json.loads(capsys.readouterr().out)["verified"]


def test_verify_finds_a_flipped_bit_and_fails(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", str(root), "verify"]) == 0, "an interrupted save is no damage"
    data = root / "000001-step10" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[100] ^= 1
    data.write_bytes(content)
    assert main(["checkpoints", str(root), "verify"]) == 1
    out = capsys.readouterr().out
    assert "000001-step10            __0_0.distcp is damaged" in out
    assert main(["checkpoints", str(root), "verify", "000002-step20"]) == 0


def test_show_tells_tensors_and_what_ranks_have_for_themselves(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", str(root), "show"]) == 0
    out = capsys.readouterr().out
    assert "step 20 of run" in out
    assert "  model.w  float32 [10, 4]" in out
    assert "  p2pstate.rank2.model.norm.mean  float32 [2]" in out


@pytest.mark.parametrize("name", [METADATA, "__0_0.distcp"])
def test_show_of_a_damaged_checkpoint_says_so_in_one_sentence(
    name: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = root / "000002-step20" / name
    file.write_bytes(bytes(file.stat().st_size))
    assert main(["checkpoints", str(root), "show"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "000002-step20" in line
    assert "damaged" in line


def test_delete_removes_what_is_named_but_never_the_last_good_one(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoints", str(root), "delete"]) == 1
    assert main(["checkpoints", str(root), "delete", "000001-step10", "000002-step20"]) == 1
    assert "no complete checkpoint would be left" in capsys.readouterr().err
    assert main(["checkpoints", str(root), "delete", "000001-step10", "000003-step30"]) == 0
    assert [path.name for path in root.iterdir()] == ["000002-step20"]


class Deleting(Directory):
    """A job deletes each checkpoint as soon as a file of it is wanted, after its manifest."""

    def open(self, save: str, name: str) -> BinaryIO:
        if name != MANIFEST:
            self.delete(save, METADATA)
        return super().open(save, name)


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        (
            "checkpoints ROOT verify",
            0,
            "000002-step20            deleted while it was read\n000001-step10            del",
        ),
        ("checkpoints ROOT show", 1, "p2pstate checkpoints: 000002-step20 was deleted while it was read: "),
        ("export ROOT ROOT/weights", 1, "p2pstate export: 000002-step20 was deleted while it was read: "),
    ],
)
def test_checkpoint_that_a_job_deletes_meanwhile_is_no_damage(
    command: str,
    code: int,
    says: str,
    root: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("p2pstate.durable.remote.Directory", Deleting)
    assert main(command.replace("ROOT", str(root)).split()) == code
    assert says in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["checkpoints", "nowhere"], "there is no directory nowhere"),
        (["checkpoints", "ck", "show", "000009-step90"], "no checkpoint called 000009-step90"),
        (["export", "ck", "out.safetensors", "--name", "000003-step30"], "no complete checkpoint 000003-step30"),
        (["checkpoints", "ck", "show", "000003-step30"], "000003-step30 is not usable: interrupted"),
        (["export", "nowhere", "out.safetensors"], "there is no directory nowhere"),
        (["export", "ck/000002-step20", "out.safetensors"], "is a single checkpoint"),
        (["export", "ck", "out.safetensors", "--rank", "4"], "there is no rank 4 in it"),
        (["export", "ck", "nowhere/out.safetensors"], "name a file in a folder that exists"),
        (["checkpoints", "ck/000002-step20"], "is a single checkpoint"),
    ],
)
def test_mistake_is_said_in_one_sentence(
    arguments: list[str], sentence: str, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(root.parent)
    assert main(arguments) == 1
    assert sentence in capsys.readouterr().err


def test_export_to_where_no_file_can_be_written_is_said_in_one_sentence(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(root), "/proc/weights.safetensors"]) == 1
    assert "p2pstate export: /proc/weights.safetensors cannot be written: " in capsys.readouterr().err


def test_export_writes_whole_weights_under_their_own_names(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "weights.safetensors"
    assert main(["export", str(root), str(target)]) == 0
    weights = load_file(target)
    assert sorted(weights) == ["bias", "norm.mean", "w"]
    assert torch.equal(weights["w"], matrix(20))
    assert torch.equal(weights["bias"], bias(20))
    assert torch.equal(weights["norm.mean"], mean(0, 20))
    assert "1 of them (such as norm.mean) differ from rank to rank" in capsys.readouterr().err
    with safe_open(target, "pt") as file:
        assert file.metadata()["step"] == "20"
    assert main(["export", str(root), str(target), "--name", "000001-step10"]) == 0
    assert torch.equal(load_file(target)["w"], matrix(10))
    capsys.readouterr()
    assert main(["export", str(root), str(target), "--rank", "2"]) == 0
    assert not capsys.readouterr().err
    weights = load_file(target)
    assert torch.equal(weights["norm.mean"], mean(2, 20))
    assert torch.equal(weights["bias"], bias(20))
