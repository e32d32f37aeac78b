"""What all commands do alike with their command lines. Pure.

In: arguments. Out: an argparse parser that takes ``--nproc_per_node`` for ``--nproc-per-node``, as torchrun does, and
that names, for an option or a command which it does not know, the one that was probably meant; and :func:`path`, the
type of everything that names a file or a folder.
"""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["Parser", "nearest", "path"]


def nearest(word: str, known: Iterable[str]) -> str:
    """``; did you mean ...?``, or nothing if none of the known is near."""
    found = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def path(text: str) -> Path:
    """``--run-dir=~/x`` is the place that ``--run-dir ~/x`` is, where the shell puts a home in for ``~``."""
    if not text:
        raise argparse.ArgumentTypeError("a path is expected, not nothing: is a variable empty?")
    return Path(os.path.expanduser(text))


class Parser(argparse.ArgumentParser):
    """``elsewhere``: of options of other programs, what takes their place here."""

    def __init__(self, *args: Any, elsewhere: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._elsewhere = dict(elsewhere or {})

    def _parse_optional(self, arg_string: str) -> Any:
        if arg_string.startswith("--"):
            name, equals, value = arg_string.partition("=")
            if name.replace("_", "-") in self._option_string_actions:
                arg_string = name.replace("_", "-") + equals + value
        return super()._parse_optional(arg_string)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.refuse(unknown)
        return options

    def refuse(self, unknown: list[str]) -> NoReturn:
        """Ends the program with what is known of the first option that is not."""
        option = next((text.partition("=")[0] for text in unknown if text.startswith("-")), unknown[0])
        hint = self._elsewhere.get(option.replace("_", "-"))
        self.error(
            f"unrecognized arguments: {' '.join(unknown)}"
            + (f"; {hint}" if hint else nearest(option, (name for name in self._option_string_actions if name != "-h")))
        )
