"""What protection costs per step, beside what others do, for DDP, FSDP2, HSDP and FSDP x TP on two nodes.

In: a model size. Out: per parallelism one run of p2prun (2 nodes of 2 workers), a table with the figures that
overhead_numbers.py defines and how far they spread, and as the last line one JSON object. Exit code 1 if a run failed
or left something behind; targets that are missed are shown, and do not change it. Everything runs with p2pstate's
defaults.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# Before this folder, which has a `rendezvous`, too.
sys.path[:0] = [str(HERE / "programs"), str(HERE.parent), str(HERE.parent / "examples")]

from overhead_numbers import (  # noqa: E402
    DEPTH,
    FORMS,
    SAVES,
    Settings,
    Spread,
    exposed,
    floor,
    milli,
    processor_time,
    saving,
    slowest,
    spread,
    step_time,
    summarise,
    targets,
    width_for,
)

from cluster import Cluster  # noqa: E402

SCRIPT = HERE / "programs" / "overhead_rank.py"
NUM_NODES, NUM_WORKERS = 2, 2
POLL_S = 0.05
RUN_LIMIT_S = 300.0
ROUNDS_SHARE, SAVES_SHARE = 0.55, 0.85  # of a run's time; the rest is for the last round and the end
MEMORY = Path("/dev/shm")
BYTES_PER_PARAMETER = 12  # the parameter and AdamW's two averages
COPIES_SAVED = 8  # torch.save's one, and two of each DCP variant, which are written in turns

Records = Sequence[Mapping[str, Any]]


class BenchFailed(Exception):
    """A run did not come to its end; the message says what was seen."""


def settings_of(args: argparse.Namespace, began: float, budget_s: float) -> Settings:
    """``budget_s`` from ``began`` on is what a run may take before it leaves rounds out."""
    num_parameters = args.parameters if args.parameters is not None else 300_000 if args.quick else 5_000_000
    return Settings(
        num_parameters=num_parameters,
        batch=args.batch,
        num_rounds=args.rounds if args.rounds is not None else 3 if args.quick else 12,
        num_save_rounds=2 if args.quick else 3,
        num_steps=3,
        num_save_steps=2,
        num_uncounted=1,
        rounds_end=began + ROUNDS_SHARE * budget_s,
        saves_end=began + SAVES_SHARE * budget_s,
        deadline_s=60.0,
    )


def scratch_folder(settings: Settings) -> Path:
    """For the saves of others: in memory if it has room, so that no disk slows them down."""
    needed = COPIES_SAVED * BYTES_PER_PARAMETER * settings.num_parameters
    roomy = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 2 * needed
    return Path(tempfile.mkdtemp(prefix="p2pstate-overhead-", dir=MEMORY if roomy else None))


def measure(form: str, settings: Settings, folder: Path, scratch: Path) -> Records:
    """One run. Raises BenchFailed."""
    out = folder / f"{form}-out"
    out.mkdir()
    progress = out / "progress"
    progress.touch()
    script = [str(SCRIPT), form, str(out), str(scratch), json.dumps(asdict(settings))]
    environ = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    shape = {"num_training": NUM_NODES, "num_spares": 0, "num_workers": NUM_WORKERS}
    with Cluster(folder / form, script, **shape, environ=environ) as cluster, progress.open() as lines:
        deadline = time.monotonic() + RUN_LIMIT_S
        while cluster.running():
            for line in lines:
                print(f"  {line.rstrip()}", flush=True)
            if time.monotonic() > deadline:
                raise BenchFailed(f"{form} took longer than {RUN_LIMIT_S:.0f} s\n{cluster.log_tails()}")
            time.sleep(POLL_S)
        codes = cluster.exit_codes()
        if any(codes.values()) or not (out / "ranks.json").exists():
            raise BenchFailed(f"{form}: nodes ended with exit codes {codes}\n{cluster.log_tails()}")
        leftovers = cluster.leftovers()
        if leftovers:
            raise BenchFailed(f"{form} left behind: {', '.join(leftovers)}")
    records: Records = json.loads((out / "ranks.json").read_text())
    return records


def table(form: str, ranks: Records, figures: Mapping[str, float]) -> list[str]:
    def row(name: str, found: Spread) -> str:
        return f"  {name:34} {milli(found.median):>12}  ({milli(found.low)} to {milli(found.high)})"

    captured = max(rank["captured_bytes"] for rank in ranks)
    steps = sum(len(window) for window in ranks[0]["windows"]["protected"])
    waits = [sum(rank["wait_s"]) / steps for rank in ranks]
    lines = [
        f"{form}: {figures['unique_bytes'] / 1e6:.1f} MB of state, {captured / 1e6:.2f} MB captured and "
        f"{figures['payload_bytes'] / 1e6:.3f} MB shipped per step by the busiest rank",
        row("step without protection", step_time(ranks)),
        row(f"exposed ({figures['exposed_pct']:.1f} %)", exposed(ranks)),
        row("  of it capture, slowest rank", slowest([rank["capture_s"] for rank in ranks])),
        f"  {'  of it waiting for the buddy, mean':34} {milli(max(waits)):>12}",
        row("processor time, ranks together", processor_time(ranks)),
        row("protected after", slowest([rank["protected_s"] for rank in ranks])),
        row("shipping while nothing else runs", floor(ranks, "ship")),
        row("floor: memcpy", floor(ranks, "memcpy")),
        row("floor: sockets", floor(ranks, "socket")),
        f"  {'protected before the next vote':34} {100 * figures['protected_share']:10.1f} %",
        f"  {'host memory per unique byte':34} {figures['host_bytes_per_unique_byte']:12.2f}",
    ]
    for save in SAVES:
        calls = spread([seconds for rank in ranks for seconds in rank["calls"][save]])
        lines.append(f"{row(save, saving(ranks, save))}, the call {milli(calls.median)}")
    lines += [f"  {'met   ' if target.met else 'missed'} {target.text}" for target in targets(form, figures)]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--parameters", type=int, help="default: about 5 million")
    parser.add_argument("--batch", type=int, default=64, help="rows per rank and step")
    parser.add_argument("--rounds", type=int, help="windows of each kind; more of them lessen the noise")
    parser.add_argument("--minutes", type=float, default=5.0, help="in all; a slow machine measures fewer rounds")
    parser.add_argument("--only", action="append", choices=FORMS, help="may be given several times; default: all")
    parser.add_argument("--quick", action="store_true", help="a small model and few steps")
    parser.add_argument("--details", type=Path, help="also write every measurement of every rank to this file")
    args = parser.parse_args()
    forms = [form for form in FORMS if args.only is None or form in args.only]
    settings = settings_of(args, time.monotonic(), 0.0)
    width = width_for(settings.num_parameters)
    size = DEPTH * (8 * width**2 + 7 * width)
    print(f"{DEPTH} blocks of width {width}: {size / 1e6:.2f} M parameters, AdamW; {settings.batch} rows per rank")
    print(f"{NUM_NODES} nodes of {NUM_WORKERS} workers; medians and quartiles of rounds; p2pstate's defaults")
    load, num_cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    print(f"{num_cores} cores; load before: {load:.1f}{' (not quiet: expect noise)' if load > 1 else ''}")
    results: dict[str, dict[str, float]] = {}
    details: dict[str, Records] = {}
    folder = Path(tempfile.mkdtemp(prefix="p2pstate-overhead-"))
    scratch = None
    failed = False
    try:
        scratch = scratch_folder(settings)
        print(f"saves of others go to {'memory' if scratch.is_relative_to(MEMORY) else 'disk'}", flush=True)
        end = time.monotonic() + 60 * args.minutes
        for index, form in enumerate(forms):
            print(f"{form}:", flush=True)
            began = time.monotonic()
            settings = settings_of(args, began, (end - began) / (len(forms) - index))
            try:
                ranks = measure(form, settings, folder, scratch)
            except BenchFailed as error:
                print(f"failed: {error}", flush=True)
                failed = True
                continue
            details[form] = ranks
            results[form] = summarise(ranks)
            print(
                "\n".join(["", *table(form, ranks, results[form]), f"  ({time.monotonic() - began:.0f} s)", ""]),
                flush=True,
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
    if args.details:
        args.details.write_text(json.dumps({"settings": asdict(settings), "ranks": details}))
    print(json.dumps(results))
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit("ended by SIGTERM"))  # so that the nodes end, too
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
