"""feed: how many batches were taken is part of the state, and some can be left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from p2pstate.feed import MAX_REST, Feed, LoopPosition
from p2pstate.types import LoopEnds


class Data:
    def __init__(self, end: int) -> None:
        self.position, self._end = 0, end

    def __iter__(self) -> Iterator[int]:
        while self.position < self._end:
            self.position += 1
            yield self.position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}


def taken(feed: Feed) -> Any:
    return feed.next()[0]


def test_batches_since_a_restored_position_are_left_out_whatever_was_left_out_before() -> None:
    data, position = Data(100), LoopPosition()
    feed = Feed(data, position)
    assert [taken(feed) for _ in range(5)] == [1, 2, 3, 4, 5]
    restored = position.state_dict()
    for skipped_to, following in [(7, 8), (9, 10)]:
        feed.drop()
        position.load_state_dict(restored)
        data.position = 5
        feed.resume()
        feed.skip_to(skipped_to)
        assert feed.num_batches == skipped_to
        assert taken(feed) == following
    feed.skip_to(3)
    assert taken(feed) == 11


def test_data_that_ends_while_batches_are_left_out_has_ended() -> None:
    feed = Feed(Data(3), position := LoopPosition())
    feed.skip_to(8)
    assert (feed.num_batches, position.iterating) == (3, False)
    with pytest.raises(StopIteration):
        feed.next()


def test_position_tells_which_loops_were_over_when_it_was_captured() -> None:
    feed = Feed(Data(3), position := LoopPosition())
    assert LoopPosition.ends_in(position.state_dict(), 7) == LoopEnds(7)
    feed.begin_loop(LoopEnds(2, 2, (10, 14)))
    assert LoopPosition.ends_in(position.state_dict(), 7) == LoopEnds(7, 2, (10, 14))


@pytest.mark.parametrize(("length", "position_after"), [(2, 2), (5, 5), (1000, 2 + MAX_REST)])
def test_pass_ends_where_the_data_of_another_rank_has_ended(length: int, position_after: int) -> None:
    feed = Feed(data := Data(length), position := LoopPosition())
    assert [taken(feed) for _ in range(2)] == [1, 2]
    feed.end_pass()
    assert (feed.num_batches, position.iterating, data.position) == (2, False, position_after)
    data.position = 0
    assert (taken(feed), feed.num_batches) == (1, 3)


def test_without_data_turns_are_counted() -> None:
    feed = Feed(None, LoopPosition())
    assert feed.next() == ()
    feed.skip_to(4)
    assert feed.num_batches == 4


@pytest.mark.parametrize(
    ("data", "train_step", "says"),
    [
        (None, lambda batch: batch, "<lambda> with no arguments, as the Replicator has no data=: missing"),
        ([1], lambda: None, "<lambda> with the batch: too many"),
        (None, 3, "a function that does one step, not int"),
    ],
)
def test_function_that_cannot_take_what_the_feed_gives_is_refused(data: Any, train_step: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Feed(data, LoopPosition()).check(train_step)


def test_functions_with_defaults_and_built_in_ones_are_taken() -> None:
    for data in (None, [1]):
        Feed(data, LoopPosition()).check(lambda batch=None, *, scale=1.0: batch)
        Feed(data, LoopPosition()).check(dict)


class Restorable(Data):
    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_rehearsal_goes_on_with_the_same_batches_when_the_data_ends() -> None:
    data = Restorable(5)
    data.position = 2
    feed = Feed(data, LoopPosition())
    feed.rehearsal_begins()
    for _ in range(3):
        assert [taken(feed) for _ in range(3)] == [3, 4, 5]
        with pytest.raises(StopIteration):
            feed.next()
        feed.ended()
        assert feed.rewind()
    empty = Feed(Restorable(0), LoopPosition())
    empty.rehearsal_begins()
    with pytest.raises(StopIteration):
        empty.next()
    assert not empty.rewind(), "without a batch there is nothing to go on with"


class Wrapped:
    """A loader of torch, epoch after epoch. It is asked to iterate with the first batch (``lazy``), at once
    (``eager``), or already when it is asked for its position, as torchdata's is (``stateful``)."""

    def __init__(self, begins: str) -> None:
        self.loader, self._begins, self.taken = DataLoader(range(4), batch_size=2), begins, 0
        self._begun: Any = None

    def __iter__(self) -> Iterator[Any]:
        if self._begins == "eager":
            self._begun = iter(self.loader)
        return self._epochs()

    def _epochs(self) -> Iterator[Any]:
        while True:
            left_out, self.taken = self.taken, 0
            self._begun = self._begun or iter(self.loader)
            for batch in self._begun:
                self.taken += 1
                if self.taken > left_out:
                    yield batch
            self._begun, self.taken = None, 0

    def state_dict(self) -> dict[str, int]:
        if self._begins == "stateful":
            self._begun = self._begun or iter(self.loader)
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken, self._begun = state["taken"], None


@pytest.mark.parametrize("begins", ["lazy", "eager", "stateful"])
def test_data_gone_on_with_in_any_batch_moves_no_stream_that_the_undisturbed_run_does_not_move(begins: str) -> None:
    def drawn(restart_at: int) -> list[Any]:
        torch.manual_seed(7)
        data, position, found = Wrapped(begins), LoopPosition(), []
        feed = Feed(data, position)
        for number in range(7):
            at = data.state_dict()
            if number == restart_at:
                state, streams = position.state_dict(), torch.get_rng_state()
                torch.rand(9)  # what a newcomer, or the discarded step, has drawn
                feed.drop()
                position.load_state_dict(state)
                torch.set_rng_state(streams)
                data.load_state_dict(at)
                feed.resume()
                data.state_dict()
            found += [taken(feed).tolist(), torch.rand(()).item()]
        return found

    assert [drawn(number) for number in range(1, 7)] == [drawn(-1)] * 6
