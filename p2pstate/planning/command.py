"""``p2pstate plan``: the command around ``plan.py``.

In: arguments. Out: an exit code (0, or 2 with a sentence that says what is wrong with which option), a page of text or
one JSON object on standard output, and a picture if one was asked for.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2pstate.arguments import path
from p2pstate.planning import units
from p2pstate.planning.formulas import mtbf_of_yearly_rate_s
from p2pstate.planning.inputs import STORAGE, Inputs
from p2pstate.planning.units import bytes_text, duration_text

if TYPE_CHECKING:
    from p2pstate.planning.plan import Plan

__all__ = ["add_commands"]

EPILOG = """\
Durations are written 90s, 10min, 1.5h, 7d; sizes 980GB, 1.2TB; counts 70B, 8e9; parts 1% or 0.01.
Defaults are round assumptions for nodes of 8 GPUs; give what you have measured. One failure rate is needed:
  p2pstate plan --gpus 2304 --mtbf 10000
  p2pstate plan --gpus 1024 --yearly-rate 1%
  p2pstate plan --gpus 32 --failure-every 1.9h --measured-gpus 608
"""


def add_commands(commands: Any) -> None:
    """Adds ``plan`` to the subparsers of ``p2pstate``."""
    default = Inputs(num_gpus=8, gpu_mtbf_s=1.0)
    plan = commands.add_parser(
        "plan",
        description="How often a cluster fails, and what checkpointing, asynchronous checkpointing and copies in "
        "other nodes' memory are worth there.",
        usage="p2pstate plan --gpus N (--mtbf H | --yearly-rate PART | --failure-every H | --run-dir DIR) [OPTION ...]",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_cluster(plan, default)
    _add_failures(plan, default)
    _add_job(plan, default)
    _add_disk(plan, default)
    _add_memory(plan, default)
    _add_output(plan)
    plan.set_defaults(run=run_command)


def _add_cluster(plan: argparse.ArgumentParser, default: Inputs) -> None:
    """What there is, and what it costs."""
    cluster = plan.add_argument_group("the cluster")
    _add(cluster, "--gpus", _whole, "N", "GPUs in the job", required=True)
    _add(cluster, "--gpus-per-node", _whole, "N", f"(default: {default.gpus_per_node})")
    _add(
        cluster,
        "--price",
        units.parse_price,
        "DOLLARS",
        f"of a node, per hour (default: {default.price_per_node_hour})",
    )
    _add(cluster, "--spares", _whole, "N", "spare nodes (default: as many as are needed)")
    _add(
        cluster, "--repair-time", _hours, "H", f"until a lost node is back (default: {duration_text(default.repair_s)})"
    )
    _add(cluster, "--rack-nodes", _whole, "N", f"nodes that a rack's failure takes (default: {default.rack_nodes})")
    _add(cluster, "--host-memory", units.parse_bytes, "BYTES", "of a node, that copies may use (default: not checked)")


def _add_failures(plan: argparse.ArgumentParser, default: Inputs) -> None:
    """How often something fails, and how much at once."""
    failures = plan.add_argument_group("failures (one of the first four)")
    rate = failures.add_mutually_exclusive_group(required=True)
    _add(rate, "--mtbf", _hours, "H", "mean time between failures of one GPU, in hours")
    _add(rate, "--yearly-rate", units.parse_share, "PART", "of GPUs that fail in a year, such as 1%%")
    _add(rate, "--failure-every", _hours, "H", "a measured interval between failures of a whole job, in hours")
    rate.add_argument(
        "--run-dir",
        type=path,
        metavar="DIR",
        help="of a run: the rate of its failures, and what else it has measured",
    )
    _add(
        failures,
        "--measured-gpus",
        _whole,
        "N",
        "GPUs of the job that --failure-every was measured on (default: --gpus)",
    )
    _add(failures, "--rack-share", units.parse_share, "PART", f"take a whole rack (default: {default.rack_share:g})")
    _add(failures, "--node-share", units.parse_share, "PART", f"take a node's memory (default: {default.node_share:g})")
    _add(
        failures,
        "--within",
        _hours,
        "H",
        "also say the chance of a failure within so long (repeatable)",
        action="append",
    )


def _add_job(plan: argparse.ArgumentParser, default: Inputs) -> None:
    """What is trained."""
    job = plan.add_argument_group("the job")
    _add(job, "--params", units.parse_count, "N", f"parameters (default: {default.num_params / 1e9:g}B)")
    _add(
        job,
        "--bytes-per-param",
        units.parse_count,
        "BYTES",
        f"of training state (default: {default.bytes_per_param:g})",
    )
    _add(job, "--state-bytes", units.parse_bytes, "BYTES", "of training state, measured, of the whole job")
    _add(job, "--step-time", _seconds, "S", f"(default: {duration_text(default.step_s)})")


def _add_disk(plan: argparse.ArgumentParser, default: Inputs) -> None:
    """What checkpointing costs."""
    disk = plan.add_argument_group("checkpoints")
    disk.add_argument(
        "--storage",
        choices=sorted(STORAGE),
        help="; ".join(f"{name}: {bytes_text(each.write_bytes_per_s)}/s per node" for name, each in STORAGE.items())
        + f" (default: {default.storage})",
    )
    _add(disk, "--save-time", _minutes, "MIN", "measured, of a synchronous save (default: from --storage)")
    _add(disk, "--load-time", _minutes, "MIN", "measured (default: from --storage)")
    _add(disk, "--interval", _minutes, "MIN", "of work between two checkpoints (default: Daly's optimum)")
    _add(disk, "--restart-time", _minutes, "MIN", f"without reading (default: {duration_text(default.restart_s)})")
    _add(disk, "--snapshot-rate", units.parse_bytes, "BYTES", "per second and node, from cards to host memory")


def _add_memory(plan: argparse.ArgumentParser, default: Inputs) -> None:
    """What copies cost, and how soon they are back."""
    memory = plan.add_argument_group("copies in other nodes' memory")
    _add(memory, "--copies", _whole, "N", f"on other nodes (default: {default.copies})")
    _add(memory, "--overhead", units.parse_share, "PART", f"of a step, exposed (default: {default.overhead:g})")
    _add(
        memory,
        "--link",
        units.parse_bytes,
        "BYTES",
        f"per second, that copies may use of a node's network (default: {bytes_text(default.link_bytes_per_s)})",
    )
    _add(
        memory,
        "--process-recovery",
        _seconds,
        "S",
        f"from the own node's memory (default: {duration_text(default.vault_recovery_s)})",
    )
    _add(
        memory,
        "--node-recovery",
        _seconds,
        "S",
        f"from another node's memory, without the transfer (default: {duration_text(default.buddy_recovery_s)})",
    )


def _add_output(plan: argparse.ArgumentParser) -> None:
    """What comes out."""
    output = plan.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object instead of text")
    output.add_argument(
        "--plot", type=path, metavar="FILE", help="also draw a picture: .png, .svg or .pdf (needs matplotlib)"
    )
    _add(output, "--seed", _whole, "N", "of the simulation (default: 0)", default=0)


def _add(group: Any, option: str, parse: Callable[[str], Any], metavar: str, text: str, **more: Any) -> None:
    group.add_argument(option, type=_argument(parse), metavar=metavar, help=text, **more)


_FIELDS = {  # option -> field of Inputs
    "gpus_per_node": "gpus_per_node",
    "price": "price_per_node_hour",
    "spares": "num_spares",
    "repair_time": "repair_s",
    "rack_nodes": "rack_nodes",
    "host_memory": "host_bytes_per_node",
    "rack_share": "rack_share",
    "node_share": "node_share",
    "params": "num_params",
    "bytes_per_param": "bytes_per_param",
    "state_bytes": "measured_state_bytes",
    "step_time": "step_s",
    "storage": "storage",
    "save_time": "measured_save_s",
    "load_time": "measured_load_s",
    "interval": "interval_s",
    "restart_time": "restart_s",
    "snapshot_rate": "snapshot_bytes_per_s",
    "copies": "copies",
    "overhead": "overhead",
    "link": "link_bytes_per_s",
    "process_recovery": "vault_recovery_s",
    "node_recovery": "buddy_recovery_s",
}


def run_command(options: argparse.Namespace) -> int:
    # Here, so that other commands start without NumPy.
    from p2pstate.planning.plan import DEFAULT_HORIZONS_S, make_plan
    from p2pstate.planning.text import as_json, as_text

    try:
        given = {field: getattr(options, option) for option, field in _FIELDS.items()}
        fields = _rates(options) | {field: value for field, value in given.items() if value is not None}
        inputs = Inputs(num_gpus=options.gpus, **fields)
        plan = make_plan(inputs, sorted({*DEFAULT_HORIZONS_S, *(options.within or [])}), seed=options.seed)
        if options.plot:
            _save_plot(plan, options.plot)
    except (ValueError, OSError) as error:
        print(f"p2pstate plan: {_in_options(str(error))}", file=sys.stderr)
        return 2
    print(json.dumps(as_json(plan), indent=2) if options.json else as_text(plan))
    return 0


def _save_plot(plan: Plan, file: Path) -> None:
    """Raises ValueError, which names the option."""
    from p2pstate.planning.plot import save_plot

    try:
        save_plot(plan, file)
    except OSError as error:
        raise ValueError(f"--plot {file} cannot be written: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"--plot {file}: {error}") from error


def _rates(options: argparse.Namespace) -> dict[str, Any]:
    """The rate of failures and what was measured with it. Raises ValueError for a rate of zero, a directory that tells
    none, or an option too many."""
    if options.measured_gpus is not None and options.failure_every is None:
        raise ValueError("--measured-gpus belongs to --failure-every")
    if options.run_dir is not None:
        from p2pstate.observe.history import read_history
        from p2pstate.planning.measured import measured_fields

        return dict(measured_fields(read_history(options.run_dir)))
    if options.mtbf is not None:
        mtbf_s: float = options.mtbf
    elif options.yearly_rate is not None:
        mtbf_s = mtbf_of_yearly_rate_s(options.yearly_rate) if options.yearly_rate else 0.0
    else:
        mtbf_s = options.failure_every * (options.gpus if options.measured_gpus is None else options.measured_gpus)
    if not mtbf_s > 0:
        raise ValueError("the mean time between failures, the rate and --measured-gpus have to be more than zero")
    return {"gpu_mtbf_s": mtbf_s}


def _in_options(text: str) -> str:
    """A field's complaint, in the words of the command line."""
    for option, field in {**_FIELDS, "gpus": "num_gpus"}.items():
        if text.startswith(f"{field} is "):
            return text.replace(field, "--" + option.replace("_", "-"), 1)
    return text.replace("gpu_mtbf_s is", "the mean time between failures of one GPU, in seconds, is", 1)


def _argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A ValueError's own sentence reaches the reader, instead of argparse's."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def _whole(text: str) -> int:
    value = units.parse_count(text)
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)


def _hours(text: str) -> float:
    return units.parse_duration(text, "h")


def _minutes(text: str) -> float:
    return units.parse_duration(text, "min")


def _seconds(text: str) -> float:
    return units.parse_duration(text, "s")
