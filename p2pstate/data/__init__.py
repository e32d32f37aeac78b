"""Data that restarts where it stopped. Usable without the rest of p2pstate, in any PyTorch program.

In: samples in memory, token files, remote files. Out: batches in an order that is a function of (seed, epoch,
position), with positions that mean *delivered* and can be saved, restored and taken up by another number of ranks.
"""

from __future__ import annotations

from p2pstate.data.order import Mixture, Shuffled
from p2pstate.data.sampler import Sampler

__all__ = ["Mixture", "Sampler", "Shuffled"]
