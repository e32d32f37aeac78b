"""What cannot be captured or restored, said so that the reader can act.

In: the name of a leaf (or of the thing that should have become one). Out: one exception class.
"""

from __future__ import annotations

__all__ = ["LeafError"]


class LeafError(ValueError):
    """Part of the training state cannot be captured, decoded or restored.

    ``name`` says which part, ``what`` what is wrong with it, ``advice`` what to do.
    """

    def __init__(self, name: str, what: str, advice: str) -> None:
        super().__init__(f"{name}: {what}; {advice}")
        self.name = name
        self.what = what
        self.advice = advice
