"""``p2pstate checkpoints`` and ``p2pstate export``: what a person does with checkpoints.

In: arguments. Out: text or JSON, exit code 0, or 1 with a sentence on standard error (for ``verify``: when a checkpoint
that is complete turns out to be damaged). A job may save and delete meanwhile: what it deletes is not called damaged.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from p2pstate.arguments import path
from p2pstate.sizes import size_text

if TYPE_CHECKING:
    from p2pstate.durable.catalog import Found
    from p2pstate.durable.manifest import Manifest

__all__ = ["FLAGS", "add_commands"]

FLAGS = frozenset({"--json"})  # may stand anywhere

PROGRESS_INTERVAL_S = 1.0
MAX_VALUE_CHARACTERS = 120


def add_commands(commands: Any) -> None:
    """Adds ``checkpoints`` and ``export`` to the subparsers of ``p2pstate``."""
    parser = commands.add_parser(
        "checkpoints",
        description="List, verify, show or delete the checkpoints of a run. Exit code: 0, or 1 for a damaged one.",
    )
    parser.add_argument("path", metavar="PLACE", help="what Replicator(checkpoint=...) was given")
    parser.add_argument(
        "action", nargs="?", choices=("list", "verify", "show", "delete"), default="list", help="(default: list)"
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="of checkpoints; without: verify all, show the newest complete one"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per checkpoint and line (list, verify)")
    parser.set_defaults(run=run_checkpoints)
    export = commands.add_parser(
        "export",
        description="Write the weights of a checkpoint, without optimizer and data position, as safetensors.",
    )
    export.add_argument("path", metavar="PLACE", help="what Replicator(checkpoint=...) was given")
    export.add_argument("output", type=path, metavar="FILE.safetensors", help="a new file")
    export.add_argument("--name", help="of the checkpoint; the newest complete one otherwise")
    export.add_argument("--rank", type=int, help="write what differs from rank to rank as this one has it")
    export.set_defaults(run=run_export)


def run_checkpoints(options: argparse.Namespace) -> int:
    """Exit code."""
    actions: dict[str, Callable[[argparse.Namespace, list[Found]], int]] = {
        "list": _list,
        "verify": _verify,
        "show": _show,
        "delete": _delete,
    }
    try:
        found = _find(options.path)
        unknown = sorted(set(options.names) - {each.name for each in found})
        if unknown:
            there = ", ".join(each.name for each in found) or "nothing"
            raise ValueError(f"no checkpoint called {unknown[0]} in {options.path} (there is: {there})")
        if not found and not options.json:
            print(f"no checkpoints in {options.path}")
        return actions[options.action](options, found)
    except BrokenPipeError:
        raise
    except (ValueError, OSError, ImportError) as error:
        print(f"p2pstate checkpoints: {error}", file=sys.stderr)
        return 1


def run_export(options: argparse.Namespace) -> int:
    """Exit code."""
    from p2pstate.durable.catalog import damaged_files
    from p2pstate.durable.export import differing, export_weights

    try:
        found = [each for each in _find(options.path) if options.name in (None, each.name)]
        chosen = [each for each in found if not each.problem]
        if not chosen:
            wanted = f"complete checkpoint {options.name}" if options.name else "complete checkpoint"
            reasons = "; ".join(f"{each.name} is not usable: {each.problem}" for each in found)
            raise ValueError(f"no {wanted} in {options.path}{reasons and f' ({reasons})'}")
        manifest = chosen[0].manifest
        with _reading(chosen[0]):
            damaged = damaged_files(chosen[0], progress=_Progress(_num_bytes(chosen[:1])))
            if damaged:
                raise ValueError(f"{chosen[0].name}: {'; '.join(damaged)}")
            num_tensors, num_bytes = export_weights(chosen[0], options.output, options.rank)
        several = [] if options.rank is not None or manifest is None else differing(manifest)
    except (ValueError, OSError, ImportError) as error:
        print(f"p2pstate export: {error}", file=sys.stderr)
        return 1
    print(f"{options.output}: {num_tensors} tensors, {size_text(num_bytes)}, step {chosen[0].step} of {chosen[0].path}")
    if several:
        print(
            f"p2pstate export: {len(several)} of them (such as {several[0]}) differ from rank to rank, and are as the "
            "first rank has them; --rank takes another one's. Stages of a pipeline and layers that are cut by hand are "
            "whole in one file only where no two parts have the same name",
            file=sys.stderr,
        )
    return 0


def _find(place: str) -> list[Found]:
    """The newest first. Raises ValueError for what is no place of checkpoints, OSError for what cannot be read."""
    from p2pstate.durable.catalog import list_checkpoints
    from p2pstate.durable.manifest import MANIFEST, METADATA
    from p2pstate.durable.remote import open_storage
    from p2pstate.durable.storage import Directory

    storage = open_storage(place)
    if isinstance(storage, Directory) and not storage.root.is_dir():
        raise ValueError(f"there is no directory {place}")
    found = list_checkpoints(storage)
    if not found and storage.sizes("").keys() & {MANIFEST, METADATA}:
        raise ValueError(f"{place} is a single checkpoint: give the place it is in, and its name as a further argument")
    return found


@contextlib.contextmanager
def _reading(found: Found) -> Iterator[None]:
    """Errors of reading a complete checkpoint that the job has deleted meanwhile say so."""
    from p2pstate.durable.catalog import deleted_since

    try:
        yield
    except (OSError, ValueError) as error:
        if deleted_since(found):
            raise ValueError(
                f"{found.name} was deleted while it was read: a running job keeps its newest ones only; take another"
            ) from error
        raise


def _list(options: argparse.Namespace, found: list[Found]) -> int:
    chosen = _chosen(options.names, found)
    if options.json:
        for each in chosen:
            print(json.dumps(_plain(each)))
        return 0
    for each in chosen:
        if each.manifest is None or each.problem:
            print(f"{each.name:24} not usable: {each.problem}")
            continue
        m = each.manifest
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(m.created_at))
        print(
            f"{each.name:24} step {m.version.step}, {m.world_size} ranks, {size_text(m.num_bytes)}, {when} ({m.reason})"
        )
    return 0


def _verify(options: argparse.Namespace, found: list[Found]) -> int:
    from p2pstate.durable.catalog import damaged_files, deleted_since

    chosen = _chosen(options.names, found)
    progress = _Progress(_num_bytes(each for each in chosen if not each.problem))
    any_damaged = False
    for each in chosen:
        damaged = [each.problem] if each.problem else damaged_files(each, progress=progress)
        if damaged and not each.problem and deleted_since(each):
            damaged = ["deleted while it was read"]
        else:
            any_damaged = any_damaged or (bool(damaged) and not each.interrupted)
        if options.json:
            print(json.dumps({**_plain(each), "verified": not damaged, "damaged": damaged}))
        else:
            print(f"{each.name:24} {'; '.join(damaged) or 'every byte is as it was written'}")
    return int(any_damaged)


def _show(options: argparse.Namespace, found: list[Found]) -> int:
    complete = [each for each in found if not each.problem]
    for each in _chosen(options.names, found) if options.names else complete[:1] or found[:1]:
        if each.manifest is None or each.problem:
            raise ValueError(f"{each.name} is not usable: {each.problem}")
        with _reading(each):
            _show_one(each, each.manifest)
    return 0


def _show_one(found: Found, m: Manifest) -> None:
    from p2pstate.durable.dcp_read import Reader

    reader = Reader(found)
    print(f"{found.path}: step {m.version.step} of run {m.run[0]}, {m.world_size} ranks, {size_text(m.num_bytes)}")
    for key, (dtype, size) in sorted(reader.tensors().items()):
        print(f"  {key}  {str(dtype).removeprefix('torch.')} {list(size)}")
    for rank in range(m.world_size):
        _show_values(reader, rank)


def _show_values(reader: Any, rank: int) -> None:
    from p2pstate.durable.keys import key_of, values_path
    from p2pstate.state.decoding import decode

    key = key_of(values_path(rank))
    values = decode(reader.read({key: reader.whole(key)})[key].numpy().tobytes())
    objects = {**values.get("objects", {}), **{f"extra.{k}": v for k, v in values.get("extra") or []}}
    for name, value in objects.items():
        text = repr(value)
        print(f"  rank {rank}: {name} = {text[:MAX_VALUE_CHARACTERS]}{'...' if text[MAX_VALUE_CHARACTERS:] else ''}")
    if values.get("rng"):
        print(f"  rank {rank}: random streams of {', '.join(values['rng'])}")


def _delete(options: argparse.Namespace, found: list[Found]) -> int:
    from p2pstate.durable.catalog import delete

    if not options.names:
        raise ValueError("delete needs the names of the checkpoints to delete")
    complete = {each.name for each in found if not each.problem}
    if complete and complete <= set(options.names):
        raise ValueError(
            f"{', '.join(sorted(complete))} would be deleted, and no complete checkpoint would be left: remove the "
            f"whole of {options.path} yourself if that is meant"
        )
    for each in _chosen(options.names, found):
        delete(each)
        print(f"{each.name} was deleted")
    return 0


def _chosen(names: Sequence[str], found: list[Found]) -> list[Found]:
    return [each for each in found if not names or each.name in names]


def _plain(found: Found) -> dict[str, Any]:
    m = found.manifest
    return {
        "name": found.name,
        "path": found.path,
        "step": found.step,
        "complete": not found.problem,
        "problem": found.problem,
        "num_ranks": m.world_size if m is not None else None,
        "bytes": m.num_bytes if m is not None else None,
        "created_at": m.created_at if m is not None else None,
        "run_id": m.run[0] if m is not None else None,
        "reason": m.reason if m is not None else None,
    }


def _num_bytes(found: Any) -> int:
    return sum(each.manifest.num_bytes for each in found)


class _Progress:
    """Says on a terminal how far reading has come, every second."""

    def __init__(self, num_bytes: int) -> None:
        self._total, self._done = num_bytes, 0
        self._said_at = time.monotonic()

    def __call__(self, num_bytes: int) -> None:
        self._done += num_bytes
        if sys.stderr.isatty() and time.monotonic() - self._said_at >= PROGRESS_INTERVAL_S:
            self._said_at = time.monotonic()
            print(f"\r{size_text(self._done)} of {size_text(self._total)} read ", end="", file=sys.stderr, flush=True)
