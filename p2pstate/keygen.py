"""``p2pstate keygen``: the secret that the nodes of a run share.

In: the name of a file. Out: that file, readable by its owner only, and an exit code: 0, or 1 with a sentence. An
existing file is never overwritten.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from p2pstate.arguments import path
from rendezvous.keys import make_key_file

__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    """Adds ``keygen`` to the subparsers of ``p2pstate``."""
    keygen = commands.add_parser(
        "keygen",
        description="Make the secret that the nodes of a run share: p2prun --key-file FILE on each of them.",
    )
    keygen.add_argument("file", type=path, metavar="FILE", help="a new file; an existing one is never overwritten")
    keygen.set_defaults(run=run_command)


def run_command(options: argparse.Namespace) -> int:
    file = options.file
    try:
        make_key_file(file)
    except FileExistsError:
        print(f"p2pstate keygen: {file} exists and is not overwritten: a run may be using it", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"p2pstate keygen: {file} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    print(f"{file}: a new secret, readable by its owner only; copy it to every node and name it there (--key-file)")
    return 0
