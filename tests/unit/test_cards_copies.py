"""cards/copies.py: which versions are good, with a card that runs nothing before it is told to."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from test_cards_gather import QueuedCard

from p2pstate.cards.copies import CardCopies
from p2pstate.errors import Retryable
from p2pstate.groups.nccl import ErrorWatch
from p2pstate.groups.status import Status
from p2pstate.state import Layout, Leaf

DEADLINE_S = 30.0
EPOCH = 3


class Watch(ErrorWatch):
    """``finds``: what NCCL says when it is asked for the first time."""

    def __init__(self, status: Status) -> None:
        super().__init__()
        self.status = status
        self.finds: Exception | None = None

    def look(self) -> None:
        if self.finds is not None:
            self.status.fail(self.finds)


class Rank:
    """One rank whose whole state is one tensor."""

    def __init__(self) -> None:
        self.card = QueuedCard()
        self.status = Status()
        self.status.loud = False
        self.status.connect(EPOCH)
        self.watch = Watch(self.status)
        self.copies = CardCopies(self.card, lambda name: True, self.status, self.watch)
        self.tensor = torch.arange(100.0)
        self.leaves = [Leaf("s", self.tensor, (0,))]
        self.layout = Layout.build(self.leaves)
        self.region = torch.zeros(self.layout.num_bytes, dtype=torch.uint8)

    def capture(self) -> Callable[[], None]:
        self.copies.gatherer.begin()
        self.copies.gatherer.write(self.layout, self.leaves, self.region, None)  # type: ignore[arg-type]
        return self.copies.start(EPOCH)

    def captured(self) -> torch.Tensor:
        return self.layout.read(self.region)["s"]


def test_version_whose_bytes_left_the_card_without_an_error_is_good() -> None:
    rank = Rank()
    land = rank.capture()
    threading.Timer(0.05, rank.card.run).start()
    land()
    assert torch.equal(rank.captured(), rank.tensor)


def test_version_that_left_the_card_after_an_abort_is_none() -> None:
    rank = Rank()
    land = rank.capture()
    rank.status.fail(RuntimeError("rank 1 died"))  # before the abort, always
    rank.card.run()  # which makes everything end, with garbage
    with pytest.raises(Retryable, match="this version is none"):
        land()


def test_version_is_none_when_nccl_knows_of_an_error_that_nobody_was_told_yet() -> None:
    rank = Rank()
    land = rank.capture()
    rank.card.run()
    rank.watch.finds = RuntimeError("NCCL reports REMOTE_ERROR")
    with pytest.raises(Retryable):
        land()
    assert "REMOTE_ERROR" in str(rank.status.error)


def test_version_of_a_round_that_is_over_is_none_although_its_error_is_forgotten() -> None:
    rank = Rank()
    land = rank.capture()
    rank.status.connect(EPOCH + 1)
    rank.card.run()
    with pytest.raises(Retryable):
        land()


def test_waiting_for_a_card_that_never_ends_ends_with_the_round() -> None:
    rank = Rank()
    land = rank.capture()
    threading.Timer(0.05, rank.status.fail, [RuntimeError("rank 1 hangs")]).start()
    with pytest.raises(Retryable):
        land()


def test_step_stands_only_if_the_card_has_done_it_without_an_error() -> None:
    rank = Rank()
    rank.capture()
    threading.Timer(0.05, rank.card.run).start()
    assert rank.copies.finish()
    rank.watch.finds = RuntimeError("NCCL reports REMOTE_ERROR")
    assert not rank.copies.finish()


def test_parameter_that_changes_too_soon_discards_the_step_by_name_and_once() -> None:
    rank = Rank()
    rank.capture()
    rank.tensor.add_(1)
    rank.copies.fence()
    assert "s: changed before optimizer.step()" in str(rank.status.error)
    rank.card.run()
    rank.status.connect(EPOCH)
    rank.capture()
    rank.tensor.add_(1)
    rank.copies.fence()
    assert rank.status.error is None


def test_host_waits_for_a_version_as_long_as_the_card_is_busy_and_no_longer() -> None:
    rank = Rank()
    asked: list[float] = []

    def has_come(seconds: float) -> bool:
        asked.append(seconds)
        if len(asked) == 3:
            rank.card.run()
        return False

    rank.capture()
    rank.copies.wait_while_busy(has_come)
    assert len(asked) == 3
    rank.copies.wait_while_busy(has_come)
    assert len(asked) == 3, "the host waited although the card had nothing to do"
    rank.capture()
    rank.copies.wait_while_busy(lambda seconds: True)
    assert not rank.card.mark().query()
