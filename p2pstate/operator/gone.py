"""`python3 -m p2pstate.operator.gone FOLDER NAME ADDRESS`: the fencing command of an operator's pods.

In: the folder into which Kubernetes puts what the operator wrote: a file for each pod that certainly runs no more. Out:
exit status 0: gone, 1: not known to be gone, 2: nobody has told anything (no operator).

Needs neither a network nor rights: the files come from the API server by way of the host. A name is not enough: only an
agent that started before the pod's end is gone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["answer"]

GONE, NOT_GONE, UNKNOWN = 0, 1, 2


def answer(folder: Path, name: str, environ: Mapping[str, str]) -> tuple[int, str]:
    """-> (exit status, sentence), about the node ``name`` whose agent started at P2PSTATE_FENCE_STARTED_US."""
    if not folder.is_dir():
        return UNKNOWN, f"there is no {folder}: no operator has told which pods are gone"
    try:
        started_us = int(environ["P2PSTATE_FENCE_STARTED_US"])
        ended_us = int((folder / Path(name).name).read_text(encoding="ascii"))
    except FileNotFoundError:
        return NOT_GONE, f"pod {name} is not known to be gone"
    except (KeyError, ValueError, OSError) as error:
        return UNKNOWN, f"what is told of pod {name} cannot be read: {error}"
    if started_us < ended_us:
        return GONE, f"pod {name} has ended, or was removed"
    return NOT_GONE, f"a pod {name} has ended, before this one started"


def main(arguments: Sequence[str]) -> int:
    """FOLDER NAME, then whatever else ``p2prun --fence`` gives."""
    if len(arguments) < 2:
        print("usage: python3 -m p2pstate.operator.gone FOLDER NAME [ADDRESS]", file=sys.stderr)
        return UNKNOWN
    status, sentence = answer(Path(arguments[0]), arguments[1], os.environ)
    print(sentence)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
