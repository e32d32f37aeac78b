"""The data benchmark: what it reads is the same from everywhere, and missed targets are named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

import data_sources
from data import misses
from data_sources import Cached, Direct, InMemory, write_tokens

from p2pstate.data import MmapTokens


def result(**changes: Any) -> dict[str, Any]:
    rates = {"memory": 100.0, "tokens": 90.0, "tokens_dataloader": 80.0, "tokens_litdata": 70.0}
    good = {"warm_vs_memory": 0.96, "cold_hidden": 0.99, "samples_per_s": rates, "resume_s": {"1": 0.001, "99": 0.049}}
    return {**good, **changes}


def test_bench_data_names_each_target_that_is_missed() -> None:
    assert misses(result()) == []
    (warm,) = misses(result(warm_vs_memory=0.9))
    assert warm == "a warm cache gives 90% of what memory gives, not 95 %"
    (cold,) = misses(result(cold_hidden=0.5))
    assert cold.startswith("a cold fetch")
    (slow,) = misses(result(resume_s={"1": 0.001, "99": 0.06}))
    assert slow == "resuming at 99 % takes 60 ms, not below 50"
    (beaten,) = misses(result(samples_per_s={**result()["samples_per_s"], "tokens_litdata": 95.0}))
    assert beaten.startswith("tokens_litdata reads the same local tokens at 95/s")


def test_bench_data_sources_all_give_the_same_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_sources, "TOKENS_PER_FILE", 3 * data_sources.LENGTH)
    monkeypatch.setattr(data_sources, "WINDOWS_PER_FILE", 3)
    monkeypatch.setattr(data_sources, "LATENCY_S", 0.0)
    paths = write_tokens(tmp_path)
    sources = [InMemory(paths), Direct(paths), Cached(paths, tmp_path / "cache")]
    tokens = MmapTokens(paths, length=data_sources.LENGTH)
    for index in (0, 5, len(tokens) - 1):
        assert all(torch.equal(source[index], tokens[index]) for source in sources)
