"""The benchmark for cards: its figures, and what it says where there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

import cards as bench


def test_bench_cards_figures_are_medians_of_pairs() -> None:
    found = bench.summary([0.30, 0.31, 0.30], [0.31, 0.311, 0.33], [0.2, 0.5, 0.7])
    assert found["step_s"] == 0.30
    assert found["exposed_s"] == pytest.approx(0.01)
    assert found["exposed_pct"] == pytest.approx(100 / 30)
    assert (found["landed_s"], found["protected_share"], found["num_versions"]) == (0.5, pytest.approx(1 / 3), 3)


def test_bench_cards_says_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["cards.py"])
    assert bench.main() == 2
    assert "needs a CUDA card" in capsys.readouterr().err
