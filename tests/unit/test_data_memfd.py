"""Batches in shared memory: what was packed comes out again, each time, whoever else has died."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

from p2pstate.data import Loader, memfd


class Marked(torch.Tensor):
    pass


GRID = torch.arange(24.0).reshape(2, 3, 4)
BATCHES: dict[str, Any] = {
    "channels_last": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    "transposed": GRID.permute(2, 0, 1),
    "expanded": torch.ones(1, 5).expand(1000, 5),
    "one value expanded": torch.tensor(1.0).expand(3, 3),
    "slice": GRID[:, 1:, ::2],
    "empty": torch.zeros(0, 5).t(),
    "conjugate": torch.view_as_complex(torch.randn(3, 4, 2)).t().conj(),
    "sparse": GRID[0].to_sparse(),
    "csr": GRID[0].to_sparse_csr(),
    "nested": torch.nested.nested_tensor([torch.ones(3), torch.ones(5)]),
    "parameter": torch.nn.Parameter(GRID),
    "subclass": GRID.as_subclass(Marked),
    "storage": GRID.untyped_storage(),
    "array": np.asfortranarray(GRID.numpy()),
}


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.UntypedStorage):
        return bytes(left) == bytes(right)
    if isinstance(left, torch.Tensor) and left.is_nested:
        return all(map(torch.equal, left.unbind(), right.unbind()))
    if isinstance(left, torch.Tensor) and left.layout is not torch.strided:
        return torch.equal(left.to_dense(), right.to_dense())
    return bool((left == right).all())


@pytest.mark.parametrize("kind", BATCHES)
def test_packed_batch_comes_out_again_and_again(kind: str) -> None:
    batch = BATCHES[kind]
    descriptor = memfd.pack(batch)
    try:
        for _ in range(2):
            found = memfd.unpack(descriptor)
            assert type(found) is type(batch)
            assert same(batch, found)
            if kind in ("channels_last", "transposed", "expanded", "one value expanded"):
                assert found.stride() == batch.stride()
    finally:
        os.close(descriptor)
    assert kind != "expanded" or len(memfd.to_bytes(batch)) < 1000  # one of its equal parts


def collate(samples: list[int]) -> Any:
    row = torch.arange(8.0) + samples[0]
    return row.to_sparse(), row.as_subclass(Marked)


def test_loader_delivers_tensors_of_any_kind_again_though_their_worker_is_gone() -> None:
    loader = Loader(range(8), 2, collate_fn=collate, num_workers=1)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    first = [next(batches), next(batches)]
    os.kill(loader.worker_pids[0], 9)
    loader.load_state_dict(state)
    again = [next(batches), next(batches)]
    loader.close()
    assert [[each.to_dense().tolist() for each in batch] for batch in again] == [
        [each.to_dense().tolist() for each in batch] for batch in first
    ]


def test_loader_without_workers_reads_again_what_cannot_be_kept() -> None:
    loader = Loader(range(8), 2, collate_fn=lambda samples: (each for each in samples), num_workers=0)
    batches = iter(loader)
    state = loader.state_dict()
    assert [list(next(batches)) for _ in range(2)] == [[0, 1], [2, 3]]
    loader.load_state_dict(state)
    assert [list(batch) for batch in batches] == [[0, 1], [2, 3], [4, 5], [6, 7]]
