"""How long recovery takes, and what it costs: p2prun and torchrun with our backend beside torchrun with DCP.

In: how many ranks, how large a model (or a script of the user's), how many kills of each kind. Out: per scenario
(recovery_scenarios.py) the median and the worst of the seconds from the signal to the next committed step on all ranks
that goes beyond the last one before it, steps lost, where the state came from, and the median of each phase; one JSON
object as the last line. The scenarios take turns, so that all of them see the same machine. With --every N one more
run, in which a worker is killed every N seconds: committed steps x undisturbed step time / wall clock, beside the bound
that one lost step per failure gives. Exit code 1 if a scenario failed.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# Before this folder, which has a `rendezvous`, too.
sys.path[:0] = [str(HERE / "programs"), str(HERE.parent), str(HERE.parent / "examples")]

from recovery_allocation import Allocation, Run, fits, take_part  # noqa: E402
from recovery_scenarios import (  # noqa: E402
    NUM_NODES,
    PEERS,
    SCENARIOS,
    Incident,
    Scenario,
    ScenarioFailed,
    Sizes,
    load_average,
    measure,
    under_failures,
    watch,
)

from namespaces import why_not  # noqa: E402

QUICK = ("ours_warm", "ours_node", "torchrun_p2p", "torchrun_dcp")
NUM_LAYERS = 8
PARAMETERS_PER_LAYER_AND_SQUARE = 12  # of a transformer: 4 w^2 for attention, 8 w^2 for the MLP


def sizes_of(args: argparse.Namespace) -> Sizes:
    wanted = args.parameters or (300_000 if args.quick else 25_000_000)
    width = max(32, round((wanted / (PARAMETERS_PER_LAYER_AND_SQUARE * NUM_LAYERS)) ** 0.5 / 8) * 8)
    program = (str(Path(args.script).resolve()), *args.script_args) if args.script else ()
    return Sizes(args.ranks, NUM_LAYERS, width, context=64, batch=2, program=program)


def summarise(incidents: Sequence[Incident]) -> dict[str, Any]:
    names = list(dict.fromkeys(name for each in incidents for name in each.phases))
    return {
        "median_s": statistics.median(each.seconds for each in incidents),
        "worst_s": max(each.seconds for each in incidents),
        "best_s": min(each.seconds for each in incidents),
        "kills": len(incidents),
        "steps_lost": max(each.steps_lost for each in incidents),
        "step_s": statistics.median(each.step_s for each in incidents),
        "source": ", ".join(sorted({each.source for each in incidents})),
        "phases": {name: statistics.median(each.phases.get(name, 0.0) for each in incidents) for name in names},
    }


def chosen(args: argparse.Namespace) -> list[Scenario]:
    names = args.only or (QUICK if args.quick else [scenario.name for scenario in SCENARIOS])
    if args.script:
        names = [scenario.name for scenario in SCENARIOS if scenario.name in names and scenario.runs_any_script]
    refused = why_not()
    if refused is not None and "ours_node_silent" in names:
        print(f"left out: ours_node_silent: {refused}")
        names = [name for name in names if name != "ours_node_silent"]
    scenarios = [scenario for scenario in SCENARIOS if scenario.name in names]
    for missing in [scenario for scenario in scenarios if not scenario.is_installed]:
        print(f"left out: {missing.name}: {PEERS[missing.launcher]} is not installed (extra bench-peers)")
        scenarios.remove(missing)
    return scenarios


def num_parameters(sizes: Sizes) -> int:
    return NUM_LAYERS * PARAMETERS_PER_LAYER_AND_SQUARE * sizes.width**2


def described(sizes: Sizes, num_kills: int) -> str:
    """What is measured, and the settings that are nobody's defaults."""
    what = " ".join(sizes.program) or f"{num_parameters(sizes) / 1e6:.1f} M parameters, FSDP2"
    lines = [f"{sizes.num_ranks} ranks on {NUM_NODES} nodes; {what}; {num_kills} kills of each kind"]
    lines.append("everywhere OMP_NUM_THREADS=1; every torchrun --max-restarts 1000 --monitor-interval 0.1")
    lines.append(
        "torchrun_p2p: last_call_timeout=0.5, preset local; torchrun's c10d: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    )
    lines.append(f"{os.cpu_count()} cores; load before: {load_average():.1f}")
    return "\n".join(lines)


def ratio(result: dict[str, Any], name: str) -> float | None:
    if name not in result or "torchrun_dcp" not in result:
        return None
    return float(result["torchrun_dcp"]["median_s"] / result[name]["median_s"])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one kill each of the most important kinds, a small model")
    parser.add_argument("--kills", type=int, help="of each kind (5; 1 with --quick)")
    parser.add_argument("--ranks", type=int, default=4, help="on two nodes (4)")
    parser.add_argument("--parameters", type=int, help="of the model (25 million; 300 thousand with --quick)")
    parser.add_argument("--only", nargs="+", choices=[scenario.name for scenario in SCENARIOS], metavar="SCENARIO")
    parser.add_argument("--every", type=float, metavar="S", help="also one run with a kill every S seconds")
    parser.add_argument("--minutes", type=float, default=5.0, help="how long that run is (5)")
    parser.add_argument("--seed", type=int, default=1, help="which ranks, and when")
    parser.add_argument(
        "--script",
        metavar="FILE",
        help="measure this script, which has a Replicator and goes on until it is ended, in place of the example; "
        "arguments of its own stand after --. Without what needs torchrun and DCP",
    )
    parser.add_argument(
        "--allocation",
        type=Path,
        metavar="FOLDER",
        help="on several hosts: give the same command on each of them, with a new folder that all see, "
        "P2PSTATE_CONTACTS (an address per host, in one order), P2PSTATE_KEY_FILE, and P2PSTATE_HOST_INDEX unless "
        "Slurm says which host this is. The first host injects the faults and prints the result; p2prun's scenarios "
        "only, and those that kill a node with three hosts or more",
    )
    parser.add_argument("script_args", nargs="*", metavar="ARGUMENT", help="of --script")
    args = parser.parse_args()
    if args.script_args and not args.script:
        parser.error(f"{args.script_args[0]}: arguments go to a --script, and there is none")
    if args.script and not Path(args.script).is_file():
        parser.error(f"--script {args.script}: there is no such file")
    if args.allocation:
        try:
            Allocation.from_env(args.allocation, os.environ)
        except ValueError as error:
            parser.error(f"--allocation: {error}")
        if args.every:
            parser.error("--every: not in an allocation")
    if args.ranks < NUM_NODES or args.ranks % NUM_NODES:
        parser.error(f"--ranks {args.ranks}: an even number, for {NUM_NODES} nodes")
    return args


def main() -> int:
    args = arguments()
    sizes, rng = sizes_of(args), random.Random(args.seed)
    allocation = Allocation.from_env(args.allocation, os.environ) if args.allocation else None
    incidents: dict[str, list[Incident]] = {}
    failed: list[str] = []
    folder = Path(tempfile.mkdtemp(prefix="p2pstate-recovery-"))
    result: dict[str, Any] = {}
    try:
        scenarios = chosen(args)
        num_kills = args.kills or (1 if args.quick else 5)
        print(described(sizes, num_kills), flush=True)
        if allocation is not None:
            scenarios = [scenario for scenario in scenarios if fits(scenario, allocation, sizes.num_ranks)]
            if allocation.index > 0:
                take_part(allocation, scenarios, sizes, num_kills)
                return 0
        for number in range(num_kills):
            for place, scenario in enumerate(scenarios):
                here = folder / f"{scenario.name}-{number}"
                try:
                    if allocation is not None:
                        started = Run(allocation, scenario, sizes, number * len(scenarios) + place, seed=number)
                        (found,) = watch(started, scenario, sizes, 1, rng)
                    else:
                        (found,) = measure(scenario, sizes, here, 1, rng)
                except ScenarioFailed as error:
                    failed.append(str(error))
                    print(f"FAILED {error}", flush=True)
                    continue
                finally:
                    shutil.rmtree(here, ignore_errors=True)
                incidents.setdefault(scenario.name, []).append(found)
                lost = f"{found.steps_lost} lost steps of {found.step_s:.2f} s"
                print(f"{scenario.name:24} {found.seconds:6.2f} s, {lost}, state from {found.source}", flush=True)
        result = {
            scenario.name: summarise(incidents[scenario.name]) for scenario in scenarios if scenario.name in incidents
        }
        show(scenarios, result)
        for key, name in (("speedup", "ours_warm"), ("speedup_buddy", "ours_buddy"), ("speedup_node", "ours_node")):
            result[key] = ratio(result, name)
        if args.every:
            useful, bound, num_failures = under_failures(sizes, folder / "every", args.every, args.minutes * 60, rng)
            result["under_failures"] = {"every_s": args.every, "useful": useful, "bound": bound, "kills": num_failures}
            print(f"a kill every {args.every:g} s ({num_failures}): useful {useful:.1%}, bound {bound:.1%}")
    except ScenarioFailed as error:
        failed.append(str(error))
        print(f"FAILED {error}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result["ranks"] = sizes.num_ranks
    if not args.script:
        result["parameters"] = num_parameters(sizes)
    result["load_average"] = load_average()
    print(json.dumps(result))
    return 1 if failed else 0


def show(scenarios: Sequence[Scenario], result: dict[str, Any]) -> None:
    print()
    for scenario in scenarios:
        found = result.get(scenario.name)
        if found is None:
            continue
        span = f"{found['median_s']:6.2f} s (worst {found['worst_s']:.2f})"
        print(f"{scenario.name:24} {span}, {found['steps_lost']} steps lost: {scenario.what}")
        print(f"{'':24} " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in found["phases"].items()))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # so that the nodes are ended, too
    sys.exit(main())
