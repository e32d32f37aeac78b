"""journal: outputs of collectives come back for the same calls, and for no others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from p2pstate.groups import journal
from p2pstate.groups.journal import Recording, Replay


def gathered() -> list[list[Tensor]]:
    return [[torch.tensor([1, 2]), torch.tensor([3, 4])]]


@pytest.fixture
def recording() -> Recording:
    recording = Recording()
    recording.ended("world", 1, "broadcast", [torch.tensor([7])])
    recording.ended("world", 2, "barrier", None)
    recording.ended("world", 3, "allgather", gathered())
    recording.ended("pair", 1, "_allgather_base", torch.tensor(1.5, dtype=torch.bfloat16))
    recording.ended("world", 4, "scatter", [torch.arange(6.0).reshape(2, 3).t()])
    return recording


def test_same_calls_get_the_same_outputs_each_once_in_whatever_order_of_groups(recording: Recording) -> None:
    replay = Replay(recording.pack())
    flat, small = torch.zeros((), dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int64)
    assert replay.answer("pair", 1, "_allgather_base", flat)
    assert flat.item() == 1.5
    assert replay.answer("world", 1, "broadcast", [small])
    assert small.item() == 7
    assert replay.answer("world", 2, "barrier", None)
    outs = [[torch.zeros(2, dtype=torch.int64) for _ in range(2)]]
    assert replay.answer("world", 3, "allgather", outs)
    assert [out.tolist() for out in outs[0]] == [[1, 2], [3, 4]]
    turned = torch.zeros(2, 3).t()  # not contiguous
    assert replay.answer("world", 4, "scatter", [turned])
    assert turned.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert not replay.answer("world", 1, "broadcast", [small])


@pytest.mark.parametrize(
    ("name", "output"),
    [("allreduce", torch.zeros(1, dtype=torch.int64)), ("broadcast", torch.zeros(2, dtype=torch.int64))],
    ids=["another call", "another size"],
)
def test_script_that_takes_another_way_gets_no_more_answers(recording: Recording, name: str, output: Tensor) -> None:
    replay = Replay(recording.pack())
    assert not replay.answer("world", 1, name, [output])
    assert not output.any()
    assert not replay.answer("world", 3, "allgather", gathered())


def test_memory_of_outputs_can_be_freed_under_them_as_sharding_does() -> None:
    recording, out = Recording(), torch.ones(4)
    recording.ended("world", 1, "_allgather_base", out)
    out.untyped_storage().resize_(0)
    again = torch.zeros(4)
    assert Replay(recording.pack()).answer("world", 1, "_allgather_base", again)
    assert again.tolist() == [1, 1, 1, 1]


def test_outputs_that_are_told_twice_are_kept_as_they_were_first(recording: Recording) -> None:
    recording.ended("world", 1, "broadcast", [torch.tensor([8])])
    out = torch.zeros(1, dtype=torch.int64)
    assert Replay(recording.pack()).answer("world", 1, "broadcast", [out])
    assert out.item() == 7


def test_of_the_first_steps_only_small_outputs_on_the_host_are_kept(recording: Recording) -> None:
    recording.in_steps = True
    sizes = journal.MAX_STEP_OUTPUT_BYTES, journal.MAX_STEP_OUTPUT_BYTES + 1
    for number, num_bytes in enumerate(sizes, start=1):
        recording.ended("stages", number, "recv", [torch.ones(num_bytes, dtype=torch.uint8)])
    recording.ended("stages", 3, "recv", [torch.ones(1, device="meta")])
    replay = Replay(recording.pack())
    outs = [torch.zeros(num_bytes, dtype=torch.uint8) for num_bytes in (*sizes, 4)]
    assert [replay.answer("stages", number, "recv", [out]) for number, out in enumerate(outs, 1)] == [
        True,
        False,
        False,
    ]
    assert outs[0].all()


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MAX_OUTPUT_BYTES", 100)
    monkeypatch.setattr(journal, "MAX_BYTES", 400)
    recording = Recording()
    for number in range(10):
        recording.ended("world", number, "broadcast", [torch.full((80 + number,), 1, dtype=torch.uint8)])
    recording.ended("world", 10, "broadcast", [torch.ones(101, dtype=torch.uint8)])
    replay = Replay(recording.pack())
    answered = [
        number
        for number in range(10)
        if replay.answer("world", number, "broadcast", [torch.zeros(80 + number, dtype=torch.uint8)])
    ]
    assert answered == [0, 1]
    assert len(recording.pack()) < 400


def test_nothing_worth_telling_packs_to_nothing() -> None:
    recording = Recording()
    recording.ended("world", 1, "barrier", None)
    assert recording.pack() == b""
    assert not Replay(b"").answer("world", 1, "barrier", None)
