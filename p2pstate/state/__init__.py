"""Live training objects <-> named leaves <-> bytes, and back in place.

``TrainingState`` is the way in and out; ``Layout`` says where leaves lie in a region of memory; ``encoding`` writes
the plain values. The vocabulary is ``Leaf`` (one named tensor) and its holders (the ranks that have the same bytes).
"""

from p2pstate.state.carried import CarriedGradients
from p2pstate.state.decoding import decode
from p2pstate.state.errors import LeafError
from p2pstate.state.inner import with_inner
from p2pstate.state.layout import Layout
from p2pstate.state.leaves import Leaf, write_into
from p2pstate.state.objects import free_name
from p2pstate.state.rng import is_generator
from p2pstate.state.training_state import Collected, TrainingState

__all__ = [
    "CarriedGradients",
    "Collected",
    "Layout",
    "Leaf",
    "LeafError",
    "TrainingState",
    "decode",
    "free_name",
    "is_generator",
    "with_inner",
    "write_into",
]
