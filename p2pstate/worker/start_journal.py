"""What collectives returned at this process's start, on its way to the agent.

In: the journal that the process's collectives are entered into (see groups/journal.py). Out: one message with all of
it, for newcomers, which do the same alone.

Invariants: nothing is sent after an error, for then collectives echo.
"""

from __future__ import annotations

from p2pstate.groups.journal import Recording
from p2pstate.groups.status import STATUS
from p2pstate.worker.link import Link

__all__ = ["end_journal", "hand_over_journal"]


def hand_over_journal(link: Link) -> None:
    """A training loop begins, or the steps that count as the start are done: send what was entered so far."""
    journal = STATUS.journal
    if isinstance(journal, Recording):
        journal.in_steps = True
        if STATUS.error is None and (packed := journal.pack()):
            link.send("journal", packed=packed)


def end_journal(link: Link) -> None:
    """From here on newcomers are with the others."""
    if STATUS.journal is not None:
        hand_over_journal(link)
        STATUS.journal = None
