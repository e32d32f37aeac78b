"""The errors p2pstate raises, by what the reader can do about them.

In: nothing. Out: a small tree of exception classes. A caller's mistake is a ``ValueError`` (or ``LeafError``,
which is one); what the world does to a run is one of the classes below. Every message says what happened, what it
means and what to do next.
"""

from __future__ import annotations

__all__ = [
    "EXIT_CONFIG",
    "EXIT_REPLACE",
    "EXIT_RETRY",
    "EXIT_STATE_LOST",
    "ConfigError",
    "Corrupted",
    "GradientsLost",
    "NotFinite",
    "P2PStateError",
    "Retryable",
    "StepDiscarded",
    "StepSkipped",
]

# Exit codes of p2prun and of workers, besides 0 (finished) and 1 (failed in user code).
EXIT_RETRY = 75  # start again on this node
EXIT_REPLACE = 76  # this node must not take part any more
EXIT_STATE_LOST = 77  # no copy of some part of the training state is left
EXIT_CONFIG = 78  # the run was described wrongly


class P2PStateError(Exception):
    """Anything that went wrong outside the caller's code."""


class ConfigError(P2PStateError, ValueError):
    """The run was described wrongly: nothing was started, or everything that was started has been ended."""


class Retryable(P2PStateError):
    """This attempt failed; the next round may well succeed."""


class Corrupted(P2PStateError):
    """Ranks that should hold the same bytes do not, and the run was asked to end then."""


class NotFinite(P2PStateError):
    """Gradients are no numbers any more, and the user wants the run to stop then."""


class GradientsLost(P2PStateError):
    """A step after a fault needs gradients from before it, which no version has."""


class StepDiscarded(BaseException):
    """Raised inside a training step whose results must not be used.

    Derives from ``BaseException`` so that ``except Exception`` in user code lets it pass. Only the frame of the step
    (``Replicator.run`` or ``with state.step():``) catches it.
    """


class StepSkipped(StepDiscarded):
    """All ranks leave this batch out, as they have voted: there was no fault, and nothing has to be restored."""
