"""meeting: every rank comes to the same end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from p2pstate.errors import ConfigError
from p2pstate.meeting import look_alone, meet
from p2pstate.memory import Bound
from p2pstate.memory_need import RankNeed
from p2pstate.settings import Settings
from p2pstate.types import RoundInfo, Start, Worker

GIB = 1 << 30
DEADLINE_S = 30.0
INFO = RoundInfo("run", "nonce", 1, Start.FRESH, "test", tuple(Worker(r, r % 2, f"n{r // 2}", "::1") for r in range(4)))
PLENTY = Bound(1 << 50, "the host's available memory")


def outcomes(settings: list[Settings], needs: list[RankNeed], rooms: list[Bound | None]) -> list[str]:
    """Of every rank: why it was refused, empty when it was not."""
    store = HashStore()

    def of(rank: int) -> str:
        try:
            decision, found = meet(store, INFO, rank, settings[rank], needs[rank], rooms[rank], DEADLINE_S)
        except ConfigError as error:
            return str(error)
        assert found == [need.sizes for need in needs]
        return "lean" if decision.lean else ""

    with ThreadPoolExecutor(len(settings)) as pool:
        return list(pool.map(of, range(len(settings))))


def test_ranks_that_agree_and_fit_go_on() -> None:
    needs = [RankNeed(GIB, 0), RankNeed(GIB, 0, address_space=PLENTY), RankNeed(0, GIB), RankNeed(GIB, GIB, GIB)]
    assert outcomes([Settings(copies=2)] * 4, needs, [PLENTY, None, PLENTY, None]) == [""] * 4


def test_rank_that_asks_for_something_else_ends_all_with_one_sentence() -> None:
    settings = [Settings(), Settings(), Settings(), Settings(every=2)]
    found = outcomes(settings, [RankNeed(0, 0)] * 4, [PLENTY, None, PLENTY, None])
    assert len(set(found)) == 1
    assert "rank 0 asks for every=1 and rank 3 for every=2" in found[0]


def test_node_that_is_too_small_ends_all_with_its_figures() -> None:
    rooms = [PLENTY, None, Bound(6 * GIB, "a limit"), None]
    found = outcomes([Settings(lean=False)] * 4, [RankNeed(GIB, 0)] * 4, rooms)
    assert len(set(found)) == 1
    assert found[0].startswith("n1 needs 8321 MiB")


def test_node_that_is_too_small_for_own_copies_makes_all_lean() -> None:
    rooms = [PLENTY, None, Bound(6 * GIB, "a limit"), None]
    assert outcomes([Settings()] * 4, [RankNeed(GIB, 0)] * 4, rooms) == ["lean"] * 4


def test_rank_that_joins_is_refused_when_its_node_is_too_small_for_as_many_like_it() -> None:
    places, full, auto, need = [0, 0, 1, 1], Settings(lean=False), Settings(), RankNeed(GIB, 0)
    assert look_alone(places, 1, full, need, Bound(9 * GIB, "a limit")) == ""
    assert look_alone(places, 1, auto, need, Bound(9 * GIB, "a limit")) == ""
    assert look_alone(places, 1, auto, need, Bound(8 * GIB, "a limit")).startswith("this node needs 8321 MiB")
    assert look_alone(places, 1, Settings(lean=True), need, Bound(8 * GIB, "a limit")) == ""
    with pytest.raises(ConfigError, match="this node needs 8321 MiB"):
        look_alone(places, 1, full, need, Bound(8 * GIB, "a limit"))
    with pytest.raises(ConfigError, match=r"this node needs 4160 MiB .*lean"):
        look_alone(places, 1, auto, need, Bound(4 * GIB, "a limit"))
