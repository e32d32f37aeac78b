"""How fast data comes: from memory, from the cache, from a slow source, from peers; and how soon after a restart.

In: token files that this program writes, behind a storage with the latency and bandwidth of an object store (simulated;
data_sources.py says which). Out: samples per second, each variant once per round, in turns; the share of a cold fetch
that compute hides; seconds from making a loader at a saved position to its first batch, its workers' start included;
seconds to take up a position in an epoch of 10 M samples; as the last line one JSON object. Targets that are missed are
shown and do not change the exit code.
"""

import argparse
import itertools
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# Before this folder, which has a `rendezvous`, too.
sys.path[:0] = [str(HERE / "programs"), str(HERE.parent)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from data_peers import peers  # noqa: E402
from data_sources import (  # noqa: E402
    BYTES_PER_S,
    LATENCY_S,
    LENGTH,
    WINDOWS_PER_FILE,
    Cached,
    Direct,
    InMemory,
    write_tokens,
)
from torch.utils.data import DataLoader, Dataset  # noqa: E402

from p2pstate.data import Loader, MmapTokens, Sampler, Shuffled  # noqa: E402

BATCH = 32
STEP_S = 0.004  # of simulated compute, where it is to hide a fetch
HIDE_FILES = 2
RESUME_SAMPLES = 10_000_000
ALREADY = 400  # batches delivered before a restart


class Nothing(Dataset[int]):
    """Costs nothing to read."""

    draws_random = False

    def __len__(self) -> int:
        return RESUME_SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


def ours(dataset: Any, workers: int, *, shuffle: bool = True) -> Loader:
    sampler = Sampler(Shuffled(len(dataset), seed=1, shuffle=shuffle), BATCH)
    return Loader(dataset, batch_sampler=sampler, num_workers=workers, pin_memory=False)


def samples_per_s(loader: Iterable[Any], seconds: float) -> float:
    """Without compute, after the first batch, for so long or to the epoch's end."""
    batches = iter(loader)
    next(batches)
    began, count = time.perf_counter(), 0
    for _ in batches:
        count += 1
        if time.perf_counter() - began > seconds:
            break
    rate = count * BATCH / (time.perf_counter() - began)
    close(loader)
    return rate


def close(loader: Any) -> None:
    if isinstance(loader, Loader):
        loader.close()


def loop_s(loader: Iterable[Any]) -> float:
    """All batches but the first, with compute."""
    batches = iter(loader)
    next(batches)
    began = time.perf_counter()
    for _ in batches:
        time.sleep(STEP_S)
    seconds = time.perf_counter() - began
    close(loader)
    return seconds


def first_batch_s(make: Callable[[], Iterable[Any]]) -> float:
    began = time.perf_counter()
    loader = make()
    next(iter(loader))
    seconds = time.perf_counter() - began
    close(loader)
    return seconds


def resumed(dataset: Any, workers: int, num_batches: int) -> Loader:
    loader = ours(dataset, workers)
    state = loader.state_dict()
    state["position"]["samples"] = num_batches * BATCH
    loader.load_state_dict(state)
    return loader


def resume_s(percent: int) -> float:
    loader = ours(Nothing(), 0)
    state = loader.state_dict()
    state["position"]["samples"] = RESUME_SAMPLES * percent // 100 // BATCH * BATCH
    began = time.perf_counter()
    loader.load_state_dict(state)
    next(iter(loader))
    return time.perf_counter() - began


def window_us(path: Path) -> dict[str, float]:
    """Processor time of one window, through MmapTokens (pread) and through a memory map, from the page cache."""
    tokens = MmapTokens([path], length=LENGTH)
    places = np.random.default_rng(2).integers(0, WINDOWS_PER_FILE, 4000)
    with path.open("rb") as file:
        mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint16)

    def by_map(index: int) -> torch.Tensor:
        return torch.from_numpy(mapped[64 + index * LENGTH : 64 + (index + 1) * LENGTH].astype(np.int64))

    def timed(read: Callable[[int], Any]) -> float:
        began = time.process_time()
        for place in places.tolist():
            read(place)
        return (time.process_time() - began) / len(places) * 1e6

    timed(by_map)
    return {"pread": timed(tokens.__getitem__), "mmap": timed(by_map)}


def measure(folder: Path, rounds: int, workers: int, seconds: float) -> dict[str, Any]:
    paths = write_tokens(folder)
    warm = folder / "warm"
    for _ in ours(Cached(paths, warm), 0, shuffle=False):
        pass
    tokens = MmapTokens(paths, length=LENGTH)
    others, missing = peers(paths, folder, BATCH, workers)
    variants: dict[str, Callable[[], Iterable[Any]]] = {
        "memory": lambda: ours(InMemory(paths), workers),
        "cache_warm": lambda: ours(Cached(paths, warm), workers),
        "cache_cold": lambda: ours(Cached(paths, fresh(folder)), workers),
        "tokens": lambda: ours(tokens, workers),
        "direct_dataloader": lambda: DataLoader(Direct(paths), BATCH, shuffle=True, num_workers=workers),
        "tokens_dataloader": lambda: DataLoader(tokens, BATCH, shuffle=True, num_workers=workers),
        **{f"tokens_{name}": lambda make=make: make(0) for name, make in others.items()},
    }
    restarts: dict[str, Callable[[], Iterable[Any]]] = {
        "cache_warm": lambda: resumed(Cached(paths, warm), workers, ALREADY),
        "cache_cold": lambda: resumed(Cached(paths, fresh(folder)), workers, ALREADY),
        "tokens": lambda: resumed(tokens, workers, ALREADY),
        "tokens_dataloader": lambda: itertools.islice(variants["tokens_dataloader"](), ALREADY, None),
    }
    if "stateful_dataloader" in others:
        others["stateful_dataloader"](ALREADY)  # reaches the position, and saves it
        restarts["tokens_stateful_dataloader"] = lambda: others["stateful_dataloader"](ALREADY)
    rates: dict[str, list[float]] = {name: [] for name in variants}
    firsts: dict[str, list[float]] = {name: [] for name in restarts}
    hidden: list[float] = []
    resumes: dict[str, list[float]] = {"1": [], "50": [], "99": []}
    windows: list[dict[str, float]] = []
    for number in range(rounds):
        for name, make in variants.items():
            rates[name].append(samples_per_s(make(), seconds))
        for name, make in restarts.items():
            firsts[name].append(first_batch_s(make))
        cold_s = loop_s(ours(Cached(paths, fresh(folder), HIDE_FILES), workers, shuffle=False))
        hidden.append(loop_s(ours(Cached(paths, warm, HIDE_FILES), workers, shuffle=False)) / cold_s)
        for percent, took in resumes.items():
            took.append(resume_s(int(percent)))
        windows.append(window_us(paths[0]))
        print(f"round {number + 1}: " + ", ".join(f"{name} {rates[name][-1]:,.0f}/s" for name in variants), flush=True)
    return {
        "warm_vs_memory": statistics.median(
            warm / memory for warm, memory in zip(rates["cache_warm"], rates["memory"], strict=True)
        ),
        "cold_hidden": statistics.median(hidden),
        "samples_per_s": {name: statistics.median(found) for name, found in rates.items()},
        "restart_first_batch_s": {name: statistics.median(found) for name, found in firsts.items()},
        "resume_s": {percent: statistics.median(found) for percent, found in resumes.items()},
        "window_us": {name: statistics.median(each[name] for each in windows) for name in windows[0]},
        "not_installed": missing,
        "settings": {
            "workers": workers,
            "batch": BATCH,
            "length": LENGTH,
            "rounds": rounds,
            "load": os.getloadavg()[0],
        },
    }


def fresh(folder: Path) -> Path:
    """An empty cache."""
    cold = folder / "cold"
    shutil.rmtree(cold, ignore_errors=True)
    return cold


def misses(result: dict[str, Any]) -> list[str]:
    """A sentence for each target that was not met."""
    rates = result["samples_per_s"]
    found = []
    if result["warm_vs_memory"] < 0.95:
        found.append(f"a warm cache gives {result['warm_vs_memory']:.0%} of what memory gives, not 95 %")
    if result["cold_hidden"] < 0.95:
        found.append(f"a cold fetch makes the loop take 1/{result['cold_hidden']:.2f} of its time")
    found += [
        f"resuming at {percent} % takes {seconds * 1e3:.0f} ms, not below 50"
        for percent, seconds in result["resume_s"].items()
        if seconds >= 0.05
    ]
    best = max((name for name in rates if name.startswith("tokens_")), key=lambda name: rates[name])
    if rates["tokens"] < rates[best]:
        found.append(
            f"{best} reads the same local tokens at {rates[best]:,.0f}/s, this loader at {rates['tokens']:,.0f}/s"
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement of a rate")
    parser.add_argument("--folder", type=Path, help="on the storage to be measured; a temporary one by default")
    args = parser.parse_args()
    print(f"storage: {LATENCY_S * 1e3:.0f} ms per request, {BYTES_PER_S / 1e6:.0f} MB/s per connection, simulated")
    with tempfile.TemporaryDirectory(prefix="p2p-data-", dir=args.folder) as folder:
        result = measure(Path(folder), args.rounds, args.workers, args.seconds)
    for name, rate in result["samples_per_s"].items():
        print(f"{name:28} {rate:12,.0f} samples/s")
    for sentence in misses(result):
        print(f"missed: {sentence}")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
