"""``p2pstate chaos``: faults in a running job, random but repeatable, or as a schedule says.

In: a job started with ``p2prun --chaos``, a seed and kinds of faults, or a file of faults. Out: faults, one after the
other, each once the job has survived the one before; a line for each, and at the end how many steps were committed
meanwhile. Exit code: 0 all were survived, 1 the job did not go on, 78 bad options.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from p2pstate.agent.chaos import ACTIONS, NODE_ACTIONS, PARTITION_S, PHASES
from p2pstate.arguments import path
from p2pstate.errors import EXIT_CONFIG
from p2pstate.operating import CommandRefused, add_operator, addresses_of, operator_line
from p2pstate.options import HelpFormatter
from rendezvous.operator import Line
from rendezvous.standing import newest_view

__all__ = ["Fault", "Standing", "add_commands", "draw", "read_schedule"]

POLL_S = 0.3
ANSWER_S = 5.0
SURVIVED_AFTER_STEPS = 2  # of all ranks, beyond the newest at the fault


@dataclass(frozen=True, slots=True)
class Fault:
    """``rank`` or ``node`` None: a random one. ``after_s`` and ``at_step``: not before both. ``seconds``: how long a
    partition lasts."""

    action: str
    rank: int | None = None
    node: str | None = None
    phase: str | None = None
    after_s: float = 0.0
    at_step: int = 0
    seconds: float = PARTITION_S


@dataclass(frozen=True, slots=True)
class Standing:
    """The job as its nodes tell. ``ranks``: rank -> (node, newest committed step); ``places``: the training nodes of
    the newest view, which began ``round``."""

    ranks: Mapping[int, tuple[str, int]]
    places: Sequence[str]
    round: int
    spares: Sequence[str]
    num_ranks: int
    ended: str

    @property
    def step(self) -> int:
        """The newest that every rank has committed; -1 while one has none."""
        if not self.ranks or len(self.ranks) < self.num_ranks:
            return -1
        return min(step for _, step in self.ranks.values())

    @property
    def newest(self) -> int:
        return max((step for _, step in self.ranks.values()), default=-1)


def standing_from(answers: Mapping[str, Mapping[str, Any]]) -> Standing:
    view = newest_view(answers.values())
    places = view["places"] if view else []
    ranks = {
        int(rank["rank"]): (name, int(rank["step"]))
        for name, answer in answers.items()
        if name in places
        for rank in answer.get("ranks", ())
    }
    per_node = max((len(answer.get("ranks", ())) for answer in answers.values()), default=0)
    ended = next((answer["verdict"]["text"] for answer in answers.values() if answer.get("verdict")), "")
    round_, spares = (view["round"], view["spares"]) if view else (0, [])
    return Standing(ranks, places, round_, spares, per_node * len(places), ended)


def draw(rng: random.Random, kinds: Sequence[str], standing: Standing, phases: Sequence[str | None]) -> Fault:
    """A random fault that this job can survive: no node is killed or cut off while none is spare."""
    possible = [kind for kind in kinds if kind not in NODE_ACTIONS or standing.spares] or ["kill"]
    kind = rng.choice(possible)
    if kind in NODE_ACTIONS:
        return Fault(kind, node=rng.choice(sorted({node for node, _ in standing.ranks.values()})))
    phase = rng.choice(list(phases)) if kind in ("kill", "stop") else None
    return Fault(kind, rank=rng.choice(sorted(standing.ranks)), phase=phase)


def read_schedule(lines: Sequence[str]) -> list[Fault]:
    """One JSON object a line, with the names of :class:`Fault`'s fields. ValueError names the line."""
    faults = []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            fault = Fault(**json.loads(line))
        except (TypeError, ValueError) as error:
            raise ValueError(f"line {number}: {error}; one object a line, like {EXAMPLE}") from error
        if fault.action not in ACTIONS:
            raise ValueError(f"line {number}: action {fault.action!r}: one of {', '.join(ACTIONS)}")
        if fault.phase is not None and fault.phase not in PHASES:
            raise ValueError(f"line {number}: phase {fault.phase!r}: one of {', '.join(PHASES)}")
        faults.append(fault)
    return faults


EXAMPLE = '{"action": "kill", "rank": 1, "phase": "stepping", "after_s": 10, "at_step": 50}'


def add_commands(commands: Any) -> None:
    parser = commands.add_parser(
        "chaos",
        description="Inject faults into a job that was started with p2prun --chaos: one after the other, each once the "
        f"job has survived the one before. A schedule has one JSON object a line, like {EXAMPLE}. Exit code: 0 all "
        "were survived, 1 the job did not go on, 78 bad options.",
        formatter_class=HelpFormatter,
    )
    add_operator(parser)
    parser.add_argument("--seed", type=int, default=0, help="which ranks, nodes and moments")
    parser.add_argument("--count", type=int, default=10, metavar="N", help="so many random faults")
    parser.add_argument("--every", type=float, default=5.0, metavar="S", help="at most this long between them")
    parser.add_argument(
        "--kinds", default="kill,stop,corrupt,node", metavar="LIST", help="of random faults; also: partition"
    )
    parser.add_argument("--schedule", type=path, metavar="FILE", help="these faults in place of random ones")
    parser.add_argument("--survive-within", type=float, default=120.0, metavar="S", help="or the job has not gone on")
    parser.set_defaults(run=run_command)


def run_command(options: argparse.Namespace) -> int:
    kinds = [kind.strip() for kind in options.kinds.split(",") if kind.strip()]
    try:
        if not kinds or set(kinds) - set(ACTIONS):
            raise CommandRefused(f"--kinds {options.kinds}: some of {','.join(ACTIONS)}")
        schedule = None
        if options.schedule is not None:
            with open(options.schedule) as file:
                lines = file.readlines()
            try:
                schedule = read_schedule(lines)
            except ValueError as error:
                raise CommandRefused(f"{options.schedule}: {error}") from error
        with operator_line(options) as (config, transport):
            return _Session(Line(config, transport), options, kinds).run(schedule)
    except (CommandRefused, OSError) as error:
        print(f"p2pstate chaos: {error}", file=sys.stderr)
        return EXIT_CONFIG


class _Session:
    def __init__(self, line: Line, options: argparse.Namespace, kinds: Sequence[str]) -> None:
        self._line = line
        self._options = options
        self._kinds = kinds
        self._rng = random.Random(options.seed)
        self._addresses: dict[str, str] = {}

    def run(self, schedule: Sequence[Fault] | None) -> int:
        began, first = time.monotonic(), self._wait(lambda standing: standing.step >= 1, self._options.timeout)
        if first is None:
            return self._failed(
                "no job that has come to its first step answers: check --contacts, --run-id, --key-file"
            )
        number = 0
        standing = first
        for number, fault in enumerate(self._faults(schedule), start=1):
            until_s = began + fault.after_s
            found = self._wait(
                lambda s, fault=fault, until_s=until_s: s.step >= max(1, fault.at_step) and time.monotonic() >= until_s,  # type: ignore[misc]
                fault.after_s + self._options.survive_within,
            )
            if found is None or found.ended:
                return self._failed(f"before fault {number}: " + (found.ended if found else "the job does not go on"))
            concrete = fault if schedule is not None else draw(self._rng, self._kinds, found, (None, *PHASES[1:4]))
            node, problem = self._inject(number, concrete, found)
            if problem:
                return self._failed(problem)
            at = time.monotonic()
            held = self._took_hold(concrete, node, found)
            if held is None:
                return self._failed(f"fault {number}: nobody noticed it (a phase that did not come?)")
            goal = held.newest + SURVIVED_AFTER_STEPS
            after = self._wait(lambda s, goal=goal: s.step >= goal, self._options.survive_within)  # type: ignore[misc]
            if after is None or (after.ended and after.step < goal):
                return self._failed(
                    f"fault {number} was not survived: " + (after.ended if after else "no further step")
                )
            print(f"      all ranks at step {after.step}, {time.monotonic() - at:.1f} s after it", flush=True)
            standing = after
        print(f"{number} faults survived, {standing.step - first.step} steps committed meanwhile")
        return 0

    def _faults(self, schedule: Sequence[Fault] | None) -> Iterator[Fault]:
        if schedule is not None:
            yield from schedule
            return
        began = time.monotonic()
        for _ in range(self._options.count):
            yield Fault("", after_s=time.monotonic() - began + self._rng.random() * self._options.every)

    def _took_hold(self, fault: Fault, node: str, found: Standing) -> Standing | None:
        """The job when the fault has done its harm, which waits for a phase; None: it has not."""
        if fault.action == "partition":
            return self._wait_out(node, fault.seconds, found)
        if fault.action == "corrupt":
            return found
        return self._wait(lambda s: s.round > found.round, self._options.survive_within)

    def _wait_out(self, node: str, seconds: float, found: Standing) -> Standing:
        """A partition: the others go on as before until they miss the node, and count it out if it lasts."""
        until_s = time.monotonic() + seconds
        held = self._wait(lambda s: node not in s.places or time.monotonic() >= until_s, 2 * seconds) or found
        print(f"      {node} was " + ("back in time" if node in held.places else "counted out"), flush=True)
        return held

    def _inject(self, number: int, fault: Fault, standing: Standing) -> tuple[str, str]:
        """Returns the node, and what went wrong."""
        rank = fault.rank
        if fault.action not in NODE_ACTIONS and rank is None:
            rank = self._rng.choice(sorted(standing.ranks))
        nodes = {number: name for number, (name, _) in standing.ranks.items()}
        node = fault.node or (nodes.get(rank) if rank is not None else None)
        if node is None:
            node = self._rng.choice(sorted(set(nodes.values())))
        request = {"action": fault.action, "rank": rank, "phase": fault.phase, "seconds": fault.seconds}
        answer = self._line.ask_one(self._addresses.get(node, ""), "chaos", request, ANSWER_S)
        if answer is None:
            return node, f"node {node} did not answer"
        if "refused" in answer:
            return node, f"node {node} refuses {request}: {answer['refused']}"
        print(f"{number:4}  {node}: {answer['done']}, at step {standing.newest}", flush=True)
        return node, ""

    def _wait(self, enough: Callable[[Standing], bool], timeout_s: float) -> Standing | None:
        """The job's standing once it is enough, or the job has ended; None when time is over."""
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            answers = self._line.ask("status", None, ANSWER_S, addresses_of)
            for answer in answers.values():
                self._addresses |= addresses_of(answer)
            standing = standing_from(answers)
            if answers and (standing.ended or enough(standing)):
                return standing
            time.sleep(POLL_S)
        return None

    def _failed(self, reason: str) -> int:
        print(f"p2pstate chaos: {reason}", file=sys.stderr)
        return 1
