"""Other loaders on the same local tokens, as far as they are installed: torchdata, litdata (extra bench-data), MosaicML
streaming.

In: token files, a folder for those that need a format of their own. Out: by name, a function that makes an iterable of
batches, begun at a batch, and the packages that are missing.
"""

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from data_sources import LENGTH, WINDOWS_PER_FILE

from p2pstate.data import MmapTokens

Make = Callable[[int], Iterable[Any]]  # the argument: how many batches have been delivered before


def peers(paths: list[Path], folder: Path, batch: int, workers: int) -> tuple[dict[str, Make], list[str]]:
    found, missing = {}, []
    for name, build in (("stateful_dataloader", _torchdata), ("litdata", _litdata), ("mosaicml_streaming", _mosaic)):
        try:
            found[name] = build(paths, folder / name, batch, workers)
        except ImportError as error:
            missing.append(f"{name} ({error.name or error})")
    return found, missing


def _torchdata(paths: list[Path], folder: Path, batch: int, workers: int) -> Make:
    from torchdata.stateful_dataloader import StatefulDataLoader

    tokens = MmapTokens(paths, length=LENGTH)

    def make(num_batches: int) -> Iterable[Any]:
        def fresh() -> Any:
            return StatefulDataLoader(tokens, batch, shuffle=True, num_workers=workers, snapshot_every_n_steps=1)

        if not num_batches:
            return fresh()
        states = _states.setdefault(num_batches, [])
        if not states:  # a position has to be reached before it can be saved
            loader = fresh()
            for _ in itertools.islice(loader, num_batches):
                pass
            states.append(loader.state_dict())
        resumed = fresh()
        resumed.load_state_dict(states[0])
        return resumed

    _states: dict[int, list[Any]] = {}
    return make


def _litdata(paths: list[Path], folder: Path, batch: int, workers: int) -> Make:
    import litdata
    from litdata.streaming.item_loader import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    class Tokens(litdata.StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            return super().__getitem__(index).long()  # as all others give them

    folder.mkdir()
    writer = BinaryWriter(str(folder), chunk_size=LENGTH * 2048, item_loader=TokensLoader(LENGTH))
    for number, path in enumerate(paths):
        tokens = np.load(path)[: WINDOWS_PER_FILE * LENGTH]
        writer[number] = _as_tensor(tokens)
    writer.done()
    writer.merge(1)

    def make(num_batches: int) -> Iterable[Any]:
        if num_batches:
            raise NotImplementedError
        dataset = Tokens(str(folder), item_loader=TokensLoader(LENGTH), shuffle=True)
        return litdata.StreamingDataLoader(dataset, batch_size=batch, num_workers=workers)

    return make


def _as_tensor(tokens: Any) -> Any:
    import torch

    return torch.from_numpy(tokens.astype(np.int32))


def _mosaic(paths: list[Path], folder: Path, batch: int, workers: int) -> Make:
    import torch
    from streaming import MDSWriter, StreamingDataset

    with MDSWriter(out=str(folder), columns={"tokens": f"ndarray:uint16:{LENGTH}"}, size_limit=1 << 23) as writer:
        for path in paths:
            tokens = np.load(path)
            for window in range(WINDOWS_PER_FILE):
                writer.write({"tokens": tokens[window * LENGTH : (window + 1) * LENGTH]})

    class Tokens(StreamingDataset):
        def __getitem__(self, at: Any) -> Any:
            return torch.from_numpy(super().__getitem__(at)["tokens"].astype(np.int64))

    def make(num_batches: int) -> Iterable[Any]:
        if num_batches:
            raise NotImplementedError
        dataset = Tokens(local=str(folder), shuffle=True, batch_size=batch)
        return torch.utils.data.DataLoader(dataset, batch_size=batch, num_workers=workers)

    return make
