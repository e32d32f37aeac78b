"""``p2pstate data pack``: the command around ``pack.py``.

In: arguments. Out: an exit code, and one line that says what was written or why nothing was.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from p2pstate.arguments import path

__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    """Adds ``data`` to the subparsers of ``p2pstate``."""
    data = commands.add_parser("data", description="Prepare training data.")
    actions = data.add_subparsers(dest="action", metavar="ACTION", required=True)
    packer = actions.add_parser(
        "pack",
        help="tokenize text (a document per file) or JSON lines (a document per line) into a token file",
        description="Tokenize text (a document per file) or JSON lines (a document per line) into a token file, which "
        "p2pstate.data.MmapTokens opens in place.",
    )
    packer.add_argument(
        "inputs",
        nargs="+",
        type=path,
        metavar="INPUT",
        help="text files, or .jsonl and .ndjson files; also .gz of them",
    )
    packer.add_argument("--output", required=True, type=path, metavar="FILE.bin", help="the token file")
    packer.add_argument(
        "--tokenizer",
        default="p2pstate.data.pack:bytes_of",
        metavar="MODULE:FUNCTION",
        help="string to integers (default: its bytes)",
    )
    packer.add_argument("--dtype", default="uint16", help="uint8, uint16 or uint32 (default: uint16)")
    packer.add_argument(
        "--field", default="text", metavar="NAME", help="of a JSON object, which holds the text (default: text)"
    )
    packer.add_argument("--end-token", type=int, metavar="N", help="a token put behind each document")
    data.set_defaults(run=run_command)


def run_command(options: argparse.Namespace) -> int:
    """Exit code 0, or 1 with a sentence."""
    from p2pstate.data.pack import load_tokenizer, pack, show  # here, so that other commands start without NumPy

    sys.path.insert(0, os.getcwd())  # where a tokenizer of one's own usually lies
    try:
        packed = pack(
            options.inputs,
            options.output,
            load_tokenizer(options.tokenizer),
            dtype=options.dtype,
            field=options.field,
            end_token=options.end_token,
            progress=show,
        )
    except (ValueError, OSError) as error:
        print(f"p2pstate data pack: {error}", file=sys.stderr)
        return 1
    print(f"{packed.path}: {packed.num_tokens} tokens of {packed.num_documents} documents")
    return 0
