"""Rendezvous and the epoch's store beside torch's own: how fast, and at what load in a large run.

In: --quick, or which parts. Out: tables, and one JSON object as the last line: `init` {N: {ours_s, tcpstore_s}},
`store_ops` {operation: {ours_per_s, tcpstore_per_s}}, `view_s`, `replace_s` {killed, silent, local, c10d}, each in
seconds, `false_suspicions` {preset: {suspected, declared_dead}}, `sim` {N: {messages_per_member_s, bytes_per_member_s,
next_view_s, ...}}, and the load of the machine. What is compared takes turns, so that both see the same machine;
figures are medians. Parts that were left out or failed are null; exit code 1 if one failed.
"""

import argparse
import json
import os
import signal
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE / "programs")  # instead of this folder, whose rendezvous.py is not the package
sys.path[1:1] = [str(HERE.parent), str(HERE.parent / "examples")]

import rendezvous_agents  # noqa: E402
import rendezvous_init  # noqa: E402
import rendezvous_sim  # noqa: E402

from namespaces import why_not  # noqa: E402

PARTS = ("init", "store", "agents", "c10d", "suspicions", "sim")


def measure_init(sizes: list[int], rounds: int) -> dict[str, Any]:
    print("to a ready gloo group, seconds (median of parts: store, group, first reduction)")
    found: dict[str, Any] = {}
    for size in sizes:
        runs: dict[str, list[dict[str, float]]] = {"ours": [], "tcpstore": []}
        for _ in range(rounds):
            for kind, list_ in runs.items():
                list_.append(rendezvous_init.init_s(kind, size))
        medians = {
            kind: {part: statistics.median(run[part] for run in list_) for part in list_[0]}
            for kind, list_ in runs.items()
        }
        texts = [
            f"{kind} {parts['total']:.3f} ({', '.join(f'{parts[p]:.3f}' for p in ('store', 'group', 'first'))})"
            for kind, parts in medians.items()
        ]
        print(f"  {size:3} processes: {'; '.join(texts)}", flush=True)
        found[str(size)] = {f"{kind}_s": parts["total"] for kind, parts in medians.items()}
    return found


def measure_store(seconds: float, rounds: int) -> dict[str, Any]:
    print(f"store operations with {rendezvous_init.NUM_CLIENTS} clients at once, per second (latency in us)")
    runs = {kind: [] for kind in ("ours", "tcpstore")}  # type: dict[str, list[dict[str, dict[str, float]]]]
    for _ in range(rounds):
        for kind, list_ in runs.items():
            list_.append(rendezvous_init.store_ops(kind, seconds))
    found: dict[str, Any] = {}
    for name in rendezvous_init.OPERATIONS:
        found[name] = {}
        for kind, list_ in runs.items():
            found[name][f"{kind}_per_s"] = statistics.median(run[name]["per_s"] for run in list_)
            found[name][f"{kind}_latency_s"] = statistics.median(run[name]["latency_s"] for run in list_)
        per_s = [
            f"{kind} {found[name][f'{kind}_per_s']:.0f} ({found[name][f'{kind}_latency_s'] * 1e6:.0f})" for kind in runs
        ]
        print(f"  {name:12} {'; '.join(per_s)}", flush=True)
    return found


def measure_agents(counts: list[int], rounds: int) -> tuple[float, dict[str, Any]]:
    """-> (launch to view, death to next view), of the first count; the others are printed."""
    silent = "silent" if why_not() else "cut"
    print(
        f"agents: launch to view, death to next view, seconds; silence is {'SIGSTOP' if why_not() else 'a cut network'}"
    )
    first: tuple[float, dict[str, Any]] | None = None
    for count in counts:
        kinds = {"killed": ("killed", "default"), "silent": (silent, "default"), "local": (silent, "local")}
        runs = {kind: [rendezvous_agents.ours(count, *how) for _ in range(rounds)] for kind, how in kinds.items()}
        view_s = statistics.median(run["view_s"] for list_ in runs.values() for run in list_)
        replace_s = {kind: statistics.median(run["replace_s"] for run in list_) for kind, list_ in runs.items()}
        worst = {kind: max(run["replace_s"] for run in list_) for kind, list_ in runs.items()}
        texts = [f"{kind} {replace_s[kind]:.2f} (worst {worst[kind]:.2f})" for kind in runs]
        print(f"  {count:3} agents: view {view_s:.2f}; {'; '.join(texts)}", flush=True)
        first = first or (view_s, replace_s)
    assert first is not None
    return first


def measure_c10d(count: int, rounds: int) -> float:
    runs = [rendezvous_agents.c10d(count) for _ in range(rounds)]
    view_s, replace_s = (statistics.median(run[name] for run in runs) for name in ("view_s", "replace_s"))
    print(f"  {count:3} agents of torchrun's c10d: view {view_s:.2f}; killed {replace_s:.2f}", flush=True)
    return replace_s


def measure_suspicions(count: int, seconds: float) -> dict[str, Any]:
    print(f"suspicions among {count} agents of whom none dies, every core oversubscribed for {seconds:g} s")
    found = {preset: rendezvous_agents.false_suspicions(count, preset, seconds) for preset in ("default", "local")}
    for preset, numbers in found.items():
        print(f"  {preset}: {numbers['suspected']} suspected, {numbers['declared_dead']} declared dead", flush=True)
    return found


def measure_sim(sizes: list[int], steady_s: float) -> dict[str, Any]:
    print("simulated members: messages and bytes per member and second (busiest); a crash known to all, the next view")
    found: dict[str, Any] = {}
    for size in sizes:
        figures = found[str(size)] = rendezvous_sim.measure(size, steady_s)
        print(
            f"  {size:6} members: {figures['messages_per_member_s']:.1f} ({figures['busiest_messages_s']:.1f}) messages"
            f", {figures['bytes_per_member_s']:.0f} ({figures['busiest_bytes_s']:.0f}) bytes; "
            f"{figures['death_known_s'] * 1e3:.0f} ms, {figures['next_view_s'] * 1e3:.0f} ms; the proposer sent "
            f"{figures['next_view_bytes'] / 1e6:.1f} MB; {figures['cores']} real cores, {figures['wall_s']:.0f} s",
            flush=True,
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few and small: half a minute")
    parser.add_argument("--only", action="append", choices=PARTS, help="may be given several times; default: all")
    parser.add_argument("--rounds", type=int, help="of each measurement (default 5; 1 with --quick)")
    parser.add_argument("--sizes", type=int, nargs="+", help="processes of the gloo group (2 8 16 32 64; 2 8)")
    parser.add_argument("--members", type=int, nargs="+", help="simulated members (1000 10000; 100)")
    parser.add_argument("--agents", type=int, nargs="+", help="agents (3 2 8 16; 3)")
    parser.add_argument("--oversubscribed", type=float, metavar="S", help="seconds of it for each preset (600; 3)")
    args = parser.parse_args()
    quick = args.quick
    wanted = args.only or [part for part in PARTS if not (quick and part == "c10d")]
    rounds = args.rounds or (1 if quick else 5)
    load, num_cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    print(f"{num_cores} cores; load before: {load:.1f}{' (not quiet: expect noise)' if load > 1 else ''}")
    counts = args.agents or ([3] if quick else [3, 2, 8, 16])
    view_s: float | None = None
    replace_s: dict[str, float | None] = dict.fromkeys(("killed", "silent", "local", "c10d"))
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "init": lambda: measure_init(args.sizes or ([2, 8] if quick else [2, 8, 16, 32, 64]), rounds),
        "store": lambda: measure_store(0.2 if quick else 1.0, rounds),
        "suspicions": lambda: measure_suspicions(3, args.oversubscribed or (3.0 if quick else 600.0)),
        "sim": lambda: measure_sim(args.members or ([100] if quick else [1000, 10000]), 5.0 if quick else 10.0),
    }
    found: dict[str, dict[str, Any] | None] = dict.fromkeys(parts)
    failed = False
    for part in wanted:
        try:
            if part == "agents":
                view_s, ours_s = measure_agents(counts, rounds)
                replace_s |= ours_s
            elif part == "c10d":
                replace_s["c10d"] = measure_c10d(counts[0], rounds)
            else:
                found[part] = parts[part]()
        except (RuntimeError, AssertionError) as error:  # what took too long; the other parts are measured all the same
            print(f"  {part} failed: {error}", flush=True)
            failed = True
    result = {
        "init": found["init"],
        "store_ops": found["store"],
        "view_s": view_s,
        "replace_s": replace_s,
        "false_suspicions": found["suspicions"],
        "sim": found["sim"],
        "load_before": load,
        "cores": num_cores,
    }
    print(json.dumps(result))
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit("ended by SIGTERM"))  # so that the agents end, too
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
