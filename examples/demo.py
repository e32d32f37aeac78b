"""The main job, shown: lose a worker, a node, at last all nodes, and end with the same bits as if nothing had happened.

In: nothing but this checkout (and --json, --random SEED). Out: a live account of two runs of train_gpt.py on three
nodes of one machine, one with three SIGKILLs and one without, a comparison of everything they left, a table, and the
exit code: 0 if it was identical and nothing was left behind. After the third kill nothing of the run is in memory: the
same commands are given again, and it goes on from disk. With --random the first two kills hit random processes at
random moments.
"""

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import Cluster
from namespaces import why_not
from outcome import Comparison, compare
from p2pstate.observe.history import read_history
from p2pstate.observe.report import as_html
from timeline import Event, Failure, Timeline

HERE = Path(__file__).resolve().parent
NUM_TRAINING, NUM_SPARES, NUM_WORKERS = 2, 1, 2
NUM_RANKS = NUM_TRAINING * NUM_WORKERS
POLL_S = 0.02
SILENCE_S = 180.0  # a run without any event for so long has failed
RUN_LIMIT_S = 300.0
MAX_DIFFERENCES_SHOWN = 20


class DemoFailed(Exception):
    """A run did not come to its end; the message says what was seen."""


@dataclass(slots=True)
class Kill:
    """A failure to inject. With `phase` the worker kills itself at that point of that step; else it is done here."""

    kind: str  # "worker", "node" or "all"
    step: int  # done from here: when all ranks have committed this step
    rank: int | None = None  # None: a random one
    node: str | None = None  # None: a random one that trains
    phase: str | None = None
    delay_s: float = 0.0  # after that step
    due: float | None = None
    done: bool = False


def planned_kills() -> list[Kill]:
    """One worker in the middle of a backward pass, then the node that all others contacted first, then all nodes."""
    return [
        Kill("worker", step=15, rank=3, phase="backward"),
        Kill("node", step=30, node="node0"),
        Kill("all", step=43),
    ]


def random_kills(rng: random.Random) -> list[Kill]:
    """A worker and a node in random order, each at a random moment of a random step; at last all nodes."""
    kinds = rng.sample(["worker", "node"], 2)
    steps = [rng.randint(4, 14), rng.randint(24, 36)]
    kills = [Kill(kind, step, delay_s=rng.uniform(0.0, 0.6)) for kind, step in zip(kinds, steps, strict=True)]
    return [*kills, Kill("all", step=43)]


class Executioner:
    """Carries out the kills that are due, and tells what was done as "injected" events."""

    def __init__(self, kills: list[Kill], cluster: Cluster, out: Path, rng: random.Random, *, silent: bool) -> None:
        self._kills, self._cluster, self._out, self._rng, self._silent = kills, cluster, out, rng, silent

    def look(self, timeline: Timeline) -> list[Event]:
        kill = next((kill for kill in self._kills if not kill.done), None)
        if kill is None or timeline.recovering:
            return []
        if kill.phase is not None:
            return self._marked(kill, timeline)
        if kill.kind == "all" and timeline.saved_step is None:
            return []  # nothing is on disk yet
        if kill.due is None and timeline.step >= kill.step:
            kill.due = time.monotonic() + kill.delay_s
        if kill.due is None or time.monotonic() < kill.due:
            return []
        kill.done = True
        if kill.kind == "node":
            name = kill.node or self._rng.choice(sorted(set(timeline.nodes.values())))
            victims = timeline.ranks_on(name)
            killed_at = self._cluster.kill_node(name, silent=self._silent)
            how = "network cut and SIGKILL" if self._silent else "SIGKILL"
            what = f"{how} to the whole of {name}: its agent, ranks {sorted(victims)} and every other process"
            return [injected("node", what, killed_at, victims)]
        if kill.kind == "all":
            victims = set(timeline.pids)
            killed_at = self._cluster.kill_all()
            self._cluster.start_again()
            what = "SIGKILL to all nodes: every agent and every other process; then the same commands once more"
            return [injected("all", what, killed_at, victims)]
        rank = self._rng.choice(sorted(timeline.pids))
        killed_at = self._cluster.kill_process(timeline.pids[rank])
        return [injected("worker", f"SIGKILL to rank {rank} on {timeline.nodes[rank]}", killed_at, {rank})]

    def _marked(self, kill: Kill, timeline: Timeline) -> list[Event]:
        """A worker that kills itself leaves a marker just before."""
        marker = self._out / f"killed-{kill.step}-{kill.rank}-{kill.phase}"
        text = marker.read_text() if marker.exists() else ""
        if not text:
            return []
        kill.done = True
        assert kill.rank is not None
        where = f"in the middle of {kill.phase} of step {kill.step}"
        what = f"SIGKILL to rank {kill.rank} on {timeline.nodes[kill.rank]} {where}"
        return [injected("worker", what, json.loads(text)["t"], {kill.rank})]


def injected(kind: str, what: str, t: float, victims: set[int]) -> Event:
    return {"event": "injected", "kind": kind, "what": what, "t": t, "victims": sorted(victims)}


def train(
    folder: Path,
    out: Path,
    args: argparse.Namespace,
    kills: list[Kill],
    rng: random.Random,
    say: Callable[[str], None],
) -> tuple[Timeline, list[str]]:
    """One run to its end. Returns what happened, and what was left behind. Raises DemoFailed."""
    script = [str(HERE / "train_gpt.py"), "--steps", str(args.steps), "--out", str(out), "--device", args.device]
    script += ["--share-cards"]  # where there are any
    if kills:
        script += ["--checkpoint", str(out / "checkpoints")]
    for kill in kills:
        if kill.phase is not None:
            script += ["--kill", f"{kill.step}:{kill.rank}:{kill.phase}"]
    out.mkdir(parents=True)
    spares = NUM_SPARES if kills else 0
    environ = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    shape = {"num_training": NUM_TRAINING, "num_spares": spares, "num_workers": NUM_WORKERS}
    timeline = Timeline(NUM_RANKS)
    with Cluster(folder, script, **shape, environ=environ, namespaces=args.namespaces) as cluster:
        executioner = Executioner(kills, cluster, out, rng, silent=args.silent)
        began = heard = time.monotonic()
        while cluster.running():
            events = cluster.events.new()
            # looked for after reading: a kill is never later than an event read here that it precedes
            events = sorted([*events, *executioner.look(timeline)], key=lambda event: event["t"])
            for line in timeline.add(events):
                say(line)
            now = time.monotonic()
            heard = now if events else heard
            if now - heard > SILENCE_S or now - began > RUN_LIMIT_S:
                raise DemoFailed(
                    f"nothing happened for {now - heard:.0f} s, {now - began:.0f} s in\n{cluster.log_tails()}"
                )
            time.sleep(POLL_S)
        for line in timeline.add(cluster.events.new()):
            say(line)
        codes = cluster.exit_codes()
        if any(codes.values()):
            raise DemoFailed(f"nodes ended with exit codes {codes}\n{cluster.log_tails()}")
        survived = [failure for failure in timeline.failures if failure.over_at is not None]
        if len(survived) != len(kills):
            raise DemoFailed(f"{len(kills)} kills were planned, {len(survived)} happened and were survived")
        return timeline, cluster.leftovers()


def table(failures: list[Failure]) -> list[str]:
    rows = [("failure", "source of the state", "steps lost", "seconds")]
    for failure in failures:
        size = f"{failure.num_bytes / 1e6:.1f} MB sent" if failure.num_bytes else "nothing sent"
        if failure.source == "disk":
            size = f"{failure.num_bytes / 1e6:.1f} MB read"
        source = f"{failure.source} ({size})"
        rows.append((failure.what.partition(":")[0], source, str(failure.steps_lost), f"{failure.seconds:.2f}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def summary(identical: bool, failures: list[Failure], differences: list[str], leftovers: list[str]) -> dict[str, Any]:
    return {
        "identical": identical,
        "failures": [
            {
                "kind": failure.kind,
                "source": failure.source,
                "bytes": failure.num_bytes,
                "steps_lost": failure.steps_lost,
                "seconds": failure.seconds,
                "phases": failure.longest_phases(),
            }
            for failure in failures
        ],
        "differences": differences,
        "leftovers": leftovers,
    }


def account(folder: Path, page: Path) -> list[str]:
    """Where the time of all ranks went, from their events; the whole report goes to `page`."""
    history = read_history(folder)
    page.write_text(as_html(history, "p2pstate demo"), encoding="utf-8")
    total = history.total
    first = f"time of {NUM_RANKS} ranks: {total.wall_s:.0f} s, goodput {100 * total.ratio:.1f} %"
    return [first, *total.table(), f"report: {page}"]


def report(compared: Comparison, say: Callable[[str], None]) -> None:
    size = f"{compared.num_bytes / 1e6:.1f} MB"
    say(f"compared {compared.num_tensors} tensors of {NUM_RANKS} ranks ({size}: parameters, optimizer, random states),")
    say(
        f"  every scalar of optimizer, schedule and loader, the positions of {compared.num_batches} batches, every loss"
    )
    for difference in compared.differences[:MAX_DIFFERENCES_SHOWN]:
        say(f"  differs: {difference}")
    if len(compared.differences) > MAX_DIFFERENCES_SHOWN:
        say(f"  and {len(compared.differences) - MAX_DIFFERENCES_SHOWN} more")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--random", type=int, metavar="SEED", help="kill random processes at random moments")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to train")
    parser.add_argument("--namespaces", action="store_true", help="each node in its own network and mounts (as root)")
    parser.add_argument("--silent", action="store_true", help="cut a node's network before killing it (--namespaces)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="where the report goes (default: a temporary file)")
    parser.add_argument("--keep", action="store_true", help="do not delete the run's folder at the end")
    args = parser.parse_args()

    refused = why_not() if args.namespaces else None
    if args.silent and not args.namespaces:
        refused = "--silent cuts a node's own network: it needs --namespaces, too"
    if refused is not None:
        parser.error(refused)

    def say(line: str) -> None:
        print(line, flush=True)

    rng = random.Random(args.random)
    kills = planned_kills() if args.random is None else random_kills(rng)
    folder = Path(tempfile.mkdtemp(prefix="p2pstate-demo-"))
    failures: list[Failure] = []
    lines: list[str] = []
    compared, leftovers = Comparison(), ["a run that did not end"]
    try:
        say(f"{NUM_TRAINING} nodes of {NUM_WORKERS} workers train a GPT for {args.steps} steps, one node is spare")
        say("every 10 steps a checkpoint goes to disk as well, in the background")
        faulted, left = train(folder / "faulted", folder / "faulted-out", args, kills, rng, say)
        failures = faulted.failures
        say("\nthe same training, undisturbed")
        _, also_left = train(folder / "undisturbed", folder / "undisturbed-out", args, [], rng, say)
        leftovers = left + also_left
        say("")
        lines = account(folder / "faulted", args.report or folder.with_suffix(".html"))
        compared = compare(folder / "faulted-out", folder / "undisturbed-out", NUM_RANKS)
        report(compared, say)
    except DemoFailed as error:
        compared.differences.append(str(error))
        say(f"failed: {error}")
    finally:
        if args.keep:
            say(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    say(f"left behind (processes, listening ports, shared memory): {', '.join(leftovers) or 'nothing'}\n")
    for line in [*table(failures), "", *lines, ""]:
        say(line)
    say(f"identical: {'yes' if compared.identical else 'no'}")
    if args.json:
        say(json.dumps(summary(compared.identical, failures, compared.differences, leftovers)))
    return 0 if compared.identical and not leftovers else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # so that the nodes are ended, too
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
