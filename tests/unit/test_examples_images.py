"""The image example: real JPEG and PNG files, decoded and augmented through the cache, the same after any restart."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("PIL", reason="Pillow decodes the pictures: pip install 'p2pstate[images]'")
pytest.importorskip("matplotlib", reason="matplotlib ships the photograph that the pictures are cut from")

import train_images
from p2pstate.data import CachedFiles
from train_images import Pictures, make_loader, make_pictures

NUM_PICTURES = 30


@pytest.fixture(scope="module")
def urls() -> list[str]:
    return make_pictures("memory://pictures", NUM_PICTURES)


def read(urls: list[str], cache: Path, workers: int, kill_at: tuple[int, ...] = ()) -> tuple[list[Any], Any]:
    loader = make_loader(Pictures(urls, CachedFiles(cache)), batch=6, epochs=2, workers=workers, seed=5)
    batches = []
    for batch in loader:
        batches.append(batch)
        if len(batches) in kill_at:
            os.kill(loader.worker_pids[0], signal.SIGKILL)
    loader.close()
    return batches, loader.stats()


def test_image_example_reads_the_same_bits_with_any_workers_and_from_a_warm_cache_nothing_again(
    urls: list[str], tmp_path: Path
) -> None:
    assert {url.rpartition(".")[2] for url in urls} == {"jpeg", "png"}
    plain, cold = read(urls, tmp_path / "a", workers=0)
    assert len(plain) == 2 * NUM_PICTURES // 6
    assert plain[0][0].shape == (6, 3, train_images.SIDE, train_images.SIDE)
    assert sorted(int(c) for _, classes in plain[:5] for c in classes) == sorted(n % 4 for n in range(NUM_PICTURES))
    by_workers, _ = read(urls, tmp_path / "b", workers=2, kill_at=(2, 6))
    _, warm = read(urls, tmp_path / "a", workers=0)
    for (pixels, classes), (others, other_classes) in zip(plain, by_workers, strict=True):
        assert torch.equal(pixels, others)
        assert torch.equal(classes, other_classes)
    assert cold.fetched_bytes > 0
    assert (warm.fetched_bytes, warm.cache_misses) == (0, 0)
    assert warm.cache_hits > 0


def test_image_example_stopped_and_started_again_ends_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(out: str, epochs: int) -> None:
        arguments = [
            "--make",
            "memory://few",
            "--pictures",
            "24",
            "--batch",
            "4",
            "--workers",
            "1",
            "--save-every",
            "4",
        ]
        monkeypatch.setattr(sys, "argv", ["train_images.py", *arguments, "--out", out, "--epochs", str(epochs)])
        train_images.main()

    run(str(tmp_path / "whole"), 2)
    whole = capsys.readouterr().out.splitlines()
    run(str(tmp_path / "twice"), 1)  # 6 steps, of which 4 are saved
    capsys.readouterr()
    run(str(tmp_path / "twice"), 2)
    resumed = capsys.readouterr().out.splitlines()
    assert resumed[0] == "goes on behind step 4"
    assert [line for line in resumed if line.startswith("step")] == whole[4:12]
