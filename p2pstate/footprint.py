"""How much of the training state is unique to this rank, and how much others hold as well.

In: the live training state, the node of every rank. Out: sizes in bytes, with the optimizer state that is yet to come.
"""

from __future__ import annotations

from collections.abc import Sequence

from p2pstate.memory import address_space
from p2pstate.memory_need import RankNeed
from p2pstate.redundancy import is_held_elsewhere
from p2pstate.state import TrainingState

__all__ = ["memory_need"]


def memory_need(state: TrainingState, rank: int, places: Sequence[int]) -> RankNeed:
    """``places``: the node of every rank, as a number."""
    collected = state.collect()
    sizes = [(leaf.tensor.nbytes, leaf.holders) for leaf in collected.leaves]
    live_bytes = 0
    for num_bytes, holders, device in state.expected_growth():
        sizes.append((num_bytes, holders))
        live_bytes += num_bytes if device.type == "cpu" else 0
    unique_bytes, alike_bytes = len(collected.values), 0
    for num_bytes, holders in sizes:
        if is_held_elsewhere(holders, places):
            num_local = sum(places[holder] == places[rank] for holder in holders)
            alike_bytes += -(-num_bytes // num_local)
        else:
            unique_bytes += num_bytes
    return RankNeed(unique_bytes, alike_bytes, live_bytes, address_space())
