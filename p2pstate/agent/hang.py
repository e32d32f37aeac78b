"""Who is at fault when a job stands still. Pure: time and samples are arguments.

In: for every rank what it is doing, for how long nothing has happened in it, and which operation of which group it has
entered and left. Out: the ranks to replace, each with the evidence in a sentence; or that nobody can be blamed.

All ranks stop when one does, because they wait for it. A rank *waits* for another one when it is inside an operation
that the other has not entered. At fault is who is waited for, waits for nobody, and has been quiet for longer than what
it does justifies. A rank that only waits is never at fault; nor is one that a debugger has stopped.

What is justified: ``FACTOR`` times a usual step and at least the floor, more for a process that is busy (compiling
looks like an endless loop, for a while), for fetching and for code between steps, much more for starting and ending;
nothing before the end of what the user has announced (``state.expect``).
Known limit: a message that the network swallowed leaves everybody waiting and nobody to blame; connections are then
made anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from p2pstate.trace import JOIN, Doing, Operation, Sample
from rendezvous.plain import count_from, flag_from, list_from, seconds_from, text_from

__all__ = [
    "DEFAULT_FLOOR_S",
    "FACTOR",
    "SLOW",
    "Evidence",
    "Fault",
    "Judgement",
    "allowed_s",
    "is_busy",
    "is_starved",
    "judge",
    "quiet_since",
    "where",
]

DEFAULT_FLOOR_S = 3.0
FACTOR = 10.0  # of a usual step: a straggler is slower by less
SLOW = 0.3  # of what is allowed: worth saying
BUSY_FACTOR = 3.0
FETCH_FACTOR = 5.0  # one rank alone may save a checkpoint
FIRST_STEPS_FACTOR = 4.0  # a process that has just joined a run whose steps are known
JOINING_S = 120.0
LONG_S = 1800.0  # starting, ending, and steps of which nothing is known
STUCK = 3.0  # times what is allowed: everybody waits, and nobody is to blame
LONE = 10.0  # times what is allowed: a quiet rank that nobody waits for
BUSY_CPU = 0.1  # of one processor
BUSY_IO_BYTES = 1 << 20  # a second
_WORLD = frozenset({"gate", JOIN})  # rows that every rank has once it is connected


@dataclass(frozen=True, slots=True)
class Evidence:
    """One rank. ``lateness``: how long it has been quiet, in units of what is allowed; ``polling``: its training thread
    is alive inside a wait."""

    rank: int
    pid: int
    count: int
    doing: Doing
    step: int
    quiet_s: float
    lateness: float
    traced: bool
    polling: bool
    expected: str
    operations: tuple[Operation, ...]

    def pack(self) -> list[object]:
        rows = [[row.key, row.round, row.entered, row.left, row.name] for row in self.operations]
        return [
            self.rank,
            self.pid,
            self.count,
            int(self.doing),
            self.step,
            self.quiet_s,
            self.lateness,
            self.traced,
            self.polling,
            self.expected,
            rows,
        ]

    @staticmethod
    def unpack(raw: object) -> Evidence:
        """ValueError when ``raw`` is not what :meth:`pack` makes."""
        rank, pid, count, doing, step, quiet_s, lateness, traced, polling, expected, rows = list_from(
            raw, "evidence", 11
        )
        return Evidence(
            count_from(rank, "a rank"),
            count_from(pid, "a process id"),
            count_from(count, "a count"),
            Doing(doing),
            count_from(step, "a step"),
            seconds_from(quiet_s),
            seconds_from(lateness),
            flag_from(traced),
            flag_from(polling),
            text_from(expected, "a phase"),
            tuple(_operation_from(row) for row in list_from(rows, "operations")),
        )


def _operation_from(raw: object) -> Operation:
    key, round_, entered, left, name = list_from(raw, "an operation", 5)
    return Operation(
        text_from(key, "a group's key"),
        count_from(round_, "a round"),
        count_from(entered, "a count"),
        count_from(left, "a count"),
        text_from(name, "an operation's name"),
    )


@dataclass(frozen=True, slots=True)
class Fault:
    """This process, as long as nothing more has happened in it, has to be replaced."""

    rank: int
    pid: int
    count: int
    sentence: str


@dataclass(frozen=True, slots=True)
class Judgement:
    """``stuck``: connections have to be made anew, with all processes as they are. ``slow``: rank -> what to say."""

    at_fault: tuple[Fault, ...] = ()
    stuck: str = ""
    slow: Mapping[int, str] = field(default_factory=dict)


def is_busy(quiet_s: float, cpu_s: float, num_io_bytes: int) -> bool:
    """``cpu_s``, ``num_io_bytes``: what a process has used while nothing was seen of it."""
    return quiet_s > 0 and (cpu_s > BUSY_CPU * quiet_s or num_io_bytes > BUSY_IO_BYTES * quiet_s)


def is_starved(state: str, quiet_s: float, cpu_s: float) -> bool:
    """It would run, and is hardly given a processor."""
    return state == "R" and cpu_s <= BUSY_CPU * quiet_s


def quiet_since(sample: Sample, changed_at: float, now: float) -> float:
    """Since when a worker has nothing to say for itself, and has not announced it. ``changed_at``: when something last
    happened in it."""
    return now if now < sample.expected_until else max(changed_at, sample.expected_until)


def allowed_s(sample: Sample, floor_s: float, *, joined: bool, busy: bool, known_turn_s: float) -> float:
    """How long a worker may be quiet. ``joined``: it takes part in the run's steps, which it does not while it starts
    alone or together with all others; ``known_turn_s``: what a step took in the process that had this rank before, 0 if
    that is not known."""
    if sample.expected_until:
        return floor_s  # it has had the time it asked for
    turn_s = sample.turn_s or FIRST_STEPS_FACTOR * known_turn_s
    if sample.doing is Doing.JOINING:
        return max(JOINING_S, FACTOR * turn_s)
    if not joined or not turn_s or sample.doing in (Doing.STARTING, Doing.ENDING):
        return max(LONG_S, FACTOR * turn_s)
    factor = (1.0 if sample.doing is Doing.STEPPING else FETCH_FACTOR) * (BUSY_FACTOR if busy else 1.0)
    return factor * max(floor_s, FACTOR * turn_s)


def judge(evidence: Mapping[int, Evidence], num_ranks: int) -> Judgement:
    """``evidence`` of all ranks, as far as there is some: without that of every rank nobody is judged."""
    if len(evidence) < num_ranks:
        return Judgement()
    waits_for = {rank: _waits_for(each, evidence) for rank, each in evidence.items()}
    in_flight = {rank for rank, each in evidence.items() if each.polling or _in_flight(each, evidence)}
    waited_for = {other for others in waits_for.values() for other in others}
    last = [evidence[rank] for rank in sorted(waited_for) if not waits_for[rank] and rank not in in_flight]
    waiting = {rank for rank, others in waits_for.items() if others} | in_flight
    at_fault = [each for each in last if each.lateness >= 1 and not each.traced]
    if at_fault:
        return Judgement(tuple(_fault(each, waits_for, evidence) for each in at_fault))
    if last:
        slow = {each.rank: _sentence(each, waits_for, evidence) for each in last if each.lateness >= SLOW}
        return Judgement(slow=slow)
    if any(each.traced for each in evidence.values()):
        return Judgement()
    if waiting and all(evidence[rank].lateness >= STUCK for rank in waiting):
        return Judgement(stuck=_stuck_sentence(waiting, evidence))
    if not waiting:
        lone = [each for each in evidence.values() if each.lateness >= LONE]
        return Judgement(tuple(_fault(each, waits_for, evidence) for each in lone))
    return Judgement()


def _waits_for(mine: Evidence, evidence: Mapping[int, Evidence]) -> set[int]:
    """The ranks that have not entered what this one is inside of."""
    found = set()
    for row in _inside(mine):
        for rank, other in evidence.items():
            theirs = _row(other, row.key)
            if rank == mine.rank or (theirs is None and row.key not in _WORLD):
                continue  # not a member
            if theirs is None or (theirs.round, theirs.entered) < (row.round, row.entered):
                found.add(rank)
    return found


def _in_flight(mine: Evidence, evidence: Mapping[int, Evidence]) -> bool:
    """It is inside something that all members have entered and none has left. (Where another one has left it, it is
    over, and what keeps this rank is something else: the notice reaches only a thread that is willing.)"""
    for row in _inside(mine):
        others = [_row(other, row.key) for rank, other in evidence.items() if rank != mine.rank]
        if not any(other is not None and other.round == row.round and other.left > row.left for other in others):
            return True
    return False


def _inside(mine: Evidence) -> Iterable[Operation]:
    return (row for row in mine.operations if row.entered > row.left)


def _row(other: Evidence, key: str) -> Operation | None:
    return next((row for row in other.operations if row.key == key), None)


def _fault(each: Evidence, waits_for: Mapping[int, set[int]], evidence: Mapping[int, Evidence]) -> Fault:
    return Fault(each.rank, each.pid, each.count, _sentence(each, waits_for, evidence))


_WHERE = {
    Doing.STARTING: "before its loop",
    Doing.FETCHING: "fetching the batch after step {step}",
    Doing.STEPPING: "in step {next}",
    Doing.BETWEEN: "in its code after step {step}",
    Doing.JOINING: "joining a round",
    Doing.ENDING: "after its last step",
}


def where(doing: Doing, step: int, expected: str) -> str:
    text = _WHERE[doing].format(step=step, next=step + 1)
    return f"{text} (announced as {expected!r})" if expected else text


def _sentence(each: Evidence, waits_for: Mapping[int, set[int]], evidence: Mapping[int, Evidence]) -> str:
    text = f"nothing has happened for {each.quiet_s:.1f} s {where(each.doing, each.step, each.expected)}"
    waiting = sorted(rank for rank, others in waits_for.items() if each.rank in others)
    if not waiting:
        return text
    inside = sorted({row.name for rank in waiting for row in _inside(evidence[rank])})
    return f"{text}; {_ranks(waiting)} for it in {' and '.join(inside)}"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown} waits" if len(ranks) == 1 else f"ranks {shown} wait"


def _stuck_sentence(waiting: set[int], evidence: Mapping[int, Evidence]) -> str:
    inside = sorted({row.name for rank in waiting for row in _inside(evidence[rank])})
    quiet_s = min(evidence[rank].quiet_s for rank in waiting)
    what = " and ".join(inside) or "a transfer"
    return (
        f"{_ranks(sorted(waiting))} in {what} for {quiet_s:.1f} s although nobody is missing (a broken connection, or "
        "ranks that call collectives in different orders): connections are made anew"
    )
