"""The errors p2pstate raises, by what the reader can do about them.

In: nothing. Out: a small tree of exception classes. A caller's mistake is a ``ValueError`` (or ``LeafError``,
which is one); what the world does to a run is one of the classes below. Every message says what happened, what it
means and what to do next.
"""

from __future__ import annotations

__all__ = ["ConfigError", "Evicted", "P2PStateError", "Retryable", "StepDiscarded", "Unrecoverable"]


class P2PStateError(Exception):
    """Anything that went wrong outside the caller's code."""


class ConfigError(P2PStateError, ValueError):
    """The run was described wrongly: nothing was started, or everything that was started has been ended."""


class Retryable(P2PStateError):
    """This attempt failed; the next round may well succeed."""


class Evicted(P2PStateError):
    """The job went on without this process: it must end and not write anything any more."""


class Unrecoverable(P2PStateError):
    """No copy of some part of the training state is left."""


class StepDiscarded(BaseException):
    """Raised inside a training step whose results must not be used.

    Derives from ``BaseException`` so that ``except Exception`` in user code lets it pass. Only the frame of the step
    (``Replicator.run`` or ``with state.step():``) catches it.
    """
