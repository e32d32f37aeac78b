"""The example's data: one stream over many files, and an order that is a pure function of seed, epoch and position."""

import itertools
from pathlib import Path

import pytest
import torch

from text_data import StdlibText, TextLoader


@pytest.fixture
def text(tmp_path: Path) -> StdlibText:
    """100 bytes, 0 to 99 in order, over four files in two folders; what is left out holds other bytes."""
    (tmp_path / "pack" / "test").mkdir(parents=True)
    for name, values in {
        "a.py": range(10),
        "empty.py": [],
        "pack/b.py": range(40, 100),
        "z.py": range(10, 40),
        "pack/test/c.py": [200],
        "notes.txt": [201],
    }.items():
        (tmp_path / name).write_bytes(bytes(values))
    return StdlibText(tmp_path)


def loader(text: StdlibText, rank: int = 0, num_ranks: int = 2, seed: int = 5) -> TextLoader:
    return TextLoader(text, context=4, batch=3, rank=rank, num_ranks=num_ranks, seed=seed)


def test_text_reads_across_files_as_one_stream(text: StdlibText) -> None:
    assert (text.num_files, text.num_bytes) == (3, 100)
    whole = bytes(text.read(0, 100))
    assert whole == bytes(range(100))
    for start, length in [(0, 0), (9, 2), (10, 30), (39, 1), (5, 95), (100, 0)]:
        assert bytes(text.read(start, length)) == whole[start : start + length]


@pytest.mark.parametrize(("start", "length"), [(-1, 2), (99, 2), (101, 0), (5, -1)])
def test_text_read_outside_of_the_stream_is_refused(text: StdlibText, start: int, length: int) -> None:
    with pytest.raises(ValueError, match="not within the 100 bytes"):
        text.read(start, length)


def test_text_of_a_folder_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no Python source files"):
        StdlibText(tmp_path)


def test_text_of_this_python_is_large_enough_to_train_on() -> None:
    assert StdlibText().num_bytes > 1_000_000


def test_loader_epoch_delivers_each_window_once_over_all_ranks(text: StdlibText) -> None:
    num_batches = 24 // 6
    for epoch in range(2):
        numbers = range(epoch * num_batches + 1, (epoch + 1) * num_batches + 1)
        seen = [p for rank in (0, 1) for number in numbers for p in loader(text, rank).positions(number)]
        assert sorted(seen) == [4 * window for window in range(24)]


def test_loader_order_depends_on_seed_and_epoch_only(text: StdlibText) -> None:
    first, again, other = (loader(text, seed=seed) for seed in (5, 5, 6))
    torch.manual_seed(1)
    backward = [again.positions(number) for number in range(8, 0, -1)]
    assert [first.positions(number) for number in range(8, 0, -1)] == backward
    assert first.positions(1) != first.positions(5)
    assert [first.positions(n) for n in range(1, 5)] != [other.positions(n) for n in range(1, 5)]


def test_loader_tokens_are_the_bytes_at_its_positions(text: StdlibText) -> None:
    for batch in itertools.islice(loader(text), 4):
        expected = [list(range(start, start + 5)) for start in batch.positions]
        assert batch.tokens.dtype == torch.int64
        assert batch.tokens.tolist() == expected


def test_loader_goes_on_after_the_last_batch_delivered(text: StdlibText) -> None:
    twin = [batch.positions for batch in itertools.islice(loader(text), 12)]
    stopped, fresh = loader(text), loader(text)
    seen = [batch.positions for batch in itertools.islice(stopped, 5)]
    fresh.load_state_dict(stopped.state_dict())
    for resumed in (stopped, fresh):
        batches = list(itertools.islice(resumed, 7))
        assert seen + [batch.positions for batch in batches] == twin
        assert [batch.number for batch in batches] == list(range(6, 13))


def test_loader_rolled_back_under_a_live_iterator_repeats(text: StdlibText) -> None:
    source = loader(text)
    batches = iter(source)
    next(batches)
    state = source.state_dict()
    second = next(batches)
    source.load_state_dict(state)
    assert next(batches).positions == second.positions


def test_loader_state_of_another_seed_or_world_is_refused(text: StdlibText) -> None:
    state = loader(text).state_dict()
    with pytest.raises(ValueError, match="seed"):
        loader(text, seed=9).load_state_dict(state)
    with pytest.raises(ValueError, match="num_ranks"):
        loader(text, num_ranks=1).load_state_dict(state)


def test_loader_of_too_little_text_is_refused(text: StdlibText) -> None:
    with pytest.raises(ValueError, match="too few"):
        TextLoader(text, context=4, batch=3, num_ranks=9)
