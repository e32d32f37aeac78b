"""A whole job as one value, and every move it can make: the version rules with slots that hold no bytes.

In: a cluster (which rank is on which node, what ranks share, how many faults may happen) and the rules: versions.py,
placement.py and plan_recovery.py, or mutants of them. Out: the number of states that were reached, or
:class:`Violation` with the shortest way to the state in which an invariant does not hold.

What a move is: everything between two instants at which a slot's header changes or ranks exchange something. A dying
process leaves its slots as they are, a dying node leaves none and a spare with an empty vault takes its place. Ranks do
nothing between a fault and the next round, for whatever they still do before they notice could as well have happened
right before the fault: it depends on nothing but what had been sent by then.
"""

from __future__ import annotations

import functools
import gc
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from p2pstate.interval import Interval
from p2pstate.placement import partners, wards
from p2pstate.plan_recovery import NOTHING_TO_LOSE_STEP, Lineage, Plan, RankReport, StartOver, StateLost, plan_recovery
from p2pstate.types import Part, RoundInfo, SlotRecord, Start, Version, Worker
from p2pstate.versions import Course, next_slot

NOTHING = Version(0, -1)
# "Protected" after a start from scratch: it can always be made again, so that the next fault may not end the run. Known
# limit: two such starts in a row promise nothing for the third fault (see next_slot).
INITIAL = -1
OWN = 0  # of the pairs of slots that one rank writes: its own first, then its wards', then what is held alike
# How far a rank is with the pairs of slots that it writes itself, and with each ward's
WRITTEN, SENDS, HASHED = range(3)
EXPECTED, ARRIVES, ARRIVED = range(3)
# What a rank is doing: training; in a round that has a plan; waiting for a round; not there yet
RUNS, JOINS, WAITS, NEW = "runs", "joins", "waits", "new"

Slot = tuple[int, int, bool] | None  # epoch, step, complete
Pair = tuple[Slot, Slot]
Holdings = tuple[tuple[Pair, ...], ...]  # of every rank: the pairs it writes, in the vault of its node
EMPTY: Pair = (None, None)


class Violation(AssertionError):
    """An invariant does not hold."""


class Job(NamedTuple):
    version: Version
    keep: Version | None
    own: int
    wards: tuple[int, ...]

    @property
    def done(self) -> bool:
        return self.own == HASHED and all(ward == ARRIVED for ward in self.wards)


class Known(NamedTuple):
    """What of a Course anything follows from."""

    kept: Version | None
    captured: Version | None
    due: bool
    interval: Interval | None


class Numbers(NamedTuple):
    """What one rank votes, or what comes of all their votes: what is complete, of an interval that adapts the steps
    that are needed, and whether ranks were alike, when they captured last, in what they were to hold alike."""

    complete: Version
    need: float
    alike: bool = True


class Rank(NamedTuple):
    doing: str
    course: Known
    step: int  # newest committed
    job: Job | None


class Vote(NamedTuple):
    step: int
    outcome: Numbers
    needs: tuple[float, ...]  # of every rank
    captures: bool | None  # what the first rank that learned the outcome made of it


class Away(NamedTuple):
    """A node that fell silent, was replaced, and lives on with what it had. It may replace its replacement."""

    place: int
    held: tuple[tuple[Pair, ...], ...]
    turns: frozenset[tuple[int, Version]]


class Faults(NamedTuple):
    """How many of each may still happen. ``pairs``: two nodes are lost at once."""

    crashes: int = 0
    losses: int = 0
    pairs: int = 0
    errors: int = 0
    silences: int = 0
    partings: int = 0  # ranks begin to train apart: until that is noticed, what they hold alike is not


class State(NamedTuple):
    epoch: int
    failed: bool  # somebody knows that this round cannot go on
    held: Holdings
    ranks: tuple[Rank, ...]
    plan: tuple[Version, Version] | None  # what this round resumes, and what it keeps meanwhile
    vote: Vote | None
    turns: tuple[frozenset[tuple[int, Version]], ...]  # of every place: what its agent remembers of resumed versions
    away: Away | None
    faults: Faults
    progress: int  # newest step that anybody ever committed
    # What no process knows
    turned: frozenset[tuple[int, Version]]  # rounds in which a step could be committed, and what they resumed
    apart: frozenset[Version]  # versions that were captured before it was noticed
    differ_from: int  # ranks train apart from this step on, and have not noticed yet; 0: they do not
    protected: Version | None  # the newest that was ever complete in all its places; step INITIAL: see there
    lost: frozenset[int]  # places that lost their vault since then


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules under test, each replaceable by a mutant."""

    committed: Callable[[Course, int, Numbers, Numbers], Course] = lambda course, step, outcome, mine: course.committed(
        step, outcome.complete, outcome.need, alike=outcome.alike
    )
    resumed: Callable[[Course, Version, Version], Course] = lambda course, version, keep: course.resumed(keep)
    next_slot: Callable[[tuple[Version | None, Version | None], Version | None], int] = next_slot
    header: Callable[[Slot], Version | None] = lambda slot: Version(slot[0], slot[1]) if slot and slot[2] else None
    plan: Callable[..., Plan | StartOver | StateLost] = plan_recovery


@dataclass(frozen=True)
class Cluster:
    """``places``: of every rank. ``shared``: sets of ranks that hold leaves alike; a rank is in one set at most.
    ``needs``: the interval adapts, and any rank may need any of these at any vote, the first of them at last.
    ``copies``: of each shard besides the own node's; ``lean``: there is none on that.

    ``eager``: from its capture on a rank counts as writing its wards' slots, earlier than a message can begin: less is
    left at any instant, so no less is shown, in far fewer states. ``brief``: once no fault may happen any more, one
    fair run is followed instead of every one.
    """

    places: tuple[int, ...]
    shared: tuple[tuple[int, ...], ...]
    faults: Faults
    max_step: int
    every: int = 1
    needs: tuple[float, ...] = ()
    copies: int = 1
    eager: bool = False
    brief: bool = False
    lean: bool = False

    @property
    def num_losses(self) -> int:
        """So many nodes may be lost at once."""
        return self.copies - self.lean

    @functools.cached_property
    def partners(self) -> list[tuple[int, ...]]:
        return partners([str(place) for place in self.places], self.copies)

    @functools.cached_property
    def wards(self) -> list[tuple[int, ...]]:
        """Of every rank: whose first partner it is, whose second, and so on: an order that renamings preserve."""
        its = wards(self.partners)
        return [tuple(sorted(its[r], key=lambda ward: self.partners[ward].index(r))) for r in range(len(its))]

    @functools.cached_property
    def losses(self) -> list[frozenset[int]]:
        """Every set of nodes whose loss a protected version outlives, the empty one among them."""
        sizes = range(self.num_losses + 1)
        return [frozenset(gone) for size in sizes for gone in itertools.combinations(self.nodes, size)]

    @functools.cached_property
    def nodes(self) -> range:
        return range(max(self.places) + 1)

    @functools.cached_property
    def parts(self) -> list[list[Part]]:
        """Of every rank: what its pairs are for."""
        out = []
        for rank, place in enumerate(self.places):
            mine = [Part.own(rank), *map(Part.own, self.wards[rank])]
            for members in self.shared:
                if rank in members:
                    local = [member for member in members if self.places[member] == place]
                    mine.append(Part.shared(members, local.index(rank), len(local)))
            out.append(mine)
        return out

    @functools.cached_property
    def workers(self) -> tuple[Worker, ...]:
        local = [self.places[:rank].count(place) for rank, place in enumerate(self.places)]
        return tuple(Worker(r, local[r], f"n{place}", "::1") for r, place in enumerate(self.places))

    @functools.cached_property
    def symmetries(self) -> list[tuple[int, ...]]:
        """Renamings of ranks that change nothing: whose state the rank ``r`` is given by ``renaming[r]``."""
        found = []
        for renaming in itertools.permutations(range(len(self.places))):
            places = {(self.places[r], self.places[other]) for r, other in enumerate(renaming)}
            sets = {tuple(sorted(renaming[r] for r in members)) for members in self.shared}
            pairing = [tuple(renaming[keeper] for keeper in its) for its in self.partners]
            alike = all(pairing[r] == self.partners[other] for r, other in enumerate(renaming))
            if len(places) == len(self.nodes) and sets == set(self.shared) and alike:
                found.append(renaming)
        return found

    def ranks_of(self, place: int) -> list[int]:
        return [rank for rank, its in enumerate(self.places) if its == place]

    def survives(self, lost: frozenset[int]) -> bool:
        """Whether what was in all its places is still in one."""
        return all(not holders <= lost for holders in self._holders)

    @functools.cached_property
    def _holders(self) -> list[set[int]]:
        keepers = [{self.places[k] for k in its} for its in self.partners]
        return keepers if self.lean else [{self.places[r], *its} for r, its in enumerate(keepers)]


class Renaming(NamedTuple):
    """``ranks``, ``places``: from what is listed by old names to a list by new ones."""

    ranks: Callable[[Any], tuple[Any, ...]]
    places: Callable[[Any], tuple[Any, ...]]
    names: dict[int, int]  # old to new


@dataclass(eq=False)
class Model:
    cluster: Cluster
    rules: Rules = field(default_factory=Rules)
    _checked: set[tuple[object, ...]] = field(default_factory=set)
    _plans: dict[tuple[object, ...], Plan | StartOver | StateLost] = field(default_factory=dict)
    _courses: dict[tuple[object, ...], Known] = field(default_factory=dict)

    def first(self) -> State:
        cluster = self.cluster
        num_ranks = len(cluster.places)
        return State(
            epoch=1,
            failed=False,
            held=tuple(tuple(EMPTY for _ in parts) for parts in cluster.parts),
            ranks=tuple(Rank(RUNS, self._begun(), 0, None) for _ in range(num_ranks)),
            plan=None,
            vote=None,
            turns=tuple(frozenset() for _ in cluster.nodes),
            away=None,
            faults=cluster.faults,
            progress=0,
            turned=frozenset(),
            apart=frozenset(),
            differ_from=0,
            protected=None,
            lost=frozenset(),
        )

    def representative(self, state: State) -> State:
        """One of the states that differ only in the names of ranks that are alike; not always the same one, so the
        number of states varies a little from run to run. (And the way to a state of more than two ranks changes names
        from one line to the next.)"""
        renamings, away = self.renamings, state.away
        if len(renamings) == 1 or (away and len(self.cluster.places) > len(self.cluster.nodes)):
            return state
        keys = [hash(both) for both in zip(state.held, state.ranks, strict=True)]
        least = min(renamings, key=lambda renaming: renaming.ranks(keys))
        if least is renamings[0]:
            return state
        vote = state.vote
        return state._replace(
            held=least.ranks(state.held),
            ranks=least.ranks(state.ranks),
            vote=vote and vote._replace(needs=least.ranks(vote.needs)),
            turns=least.places(state.turns),
            lost=frozenset(least.names[place] for place in state.lost),
            away=away and away._replace(place=least.names[away.place]),
        )

    @functools.cached_property
    def renamings(self) -> list[Renaming]:
        out, places = [], self.cluster.places
        for renaming in self.cluster.symmetries:
            before = {places[r]: places[other] for r, other in enumerate(renaming)}
            names = {other: place for place, other in before.items()}
            getter = operator.itemgetter(*(before[place] for place in self.cluster.nodes))
            out.append(Renaming(operator.itemgetter(*renaming), getter, names))
        return out

    # -- moves without a fault, in the order in which a fair run makes them

    def moves(self, state: State) -> Iterator[tuple[str, State | None]]:
        """What can happen next; None: the run ends, and may."""
        ranks = state.ranks
        numbers = range(len(ranks))
        if state.failed:
            yield "recovery", self.recover(state)
            return
        for r in numbers:
            rank = ranks[r]
            if rank.doing is JOINS:
                yield f"rank {r} resumes", self.resume(state, r)
            elif rank.doing is RUNS and state.vote and rank.step < state.vote.step:
                yield f"rank {r} commits step {state.vote.step}", self.commit(state, r)
            elif rank.doing is RUNS and rank.course.due:
                yield f"rank {r} captures step {rank.step}", self.capture(state, r)
        for r in numbers:
            rank = ranks[r]
            if rank.doing is RUNS and rank.job and not rank.job.done:
                if rank.job.own != HASHED:
                    yield f"rank {r} sends", self.send(state, r, rank.job)
                for number in range(len(rank.job.wards)):
                    after = self.receive(state, r, rank.job, number)
                    if after:
                        yield f"rank {r} receives", after
        together = state.vote is None and all(rank.doing is RUNS for rank in ranks)
        if together and not any(rank.course.due for rank in ranks):
            for needs in itertools.product(self.cluster.needs or (1.0,), repeat=len(ranks)):
                yield f"vote, needs {needs}" if self.cluster.needs else "vote", self.cast(state, needs)

    def capture(self, state: State, r: int) -> State:
        rank = state.ranks[r]
        if rank.job and not rank.job.done:
            raise Violation(f"rank {r} captures step {rank.step} while {rank.job.version} is being shipped")
        version, keep = Version(state.epoch, rank.step), rank.course.kept
        held, wards = state.held, self.cluster.wards[r]
        if not self.cluster.lean:
            held = self._write(held, r, OWN, version, keep)
        for which in range(1 + len(wards), len(held[r])):
            held = self._write(held, r, which, version, keep)
        if self.cluster.eager:
            for number in range(len(wards)):
                held = self._write(held, r, 1 + number, version, keep)
        come = (ARRIVES if self.cluster.eager else EXPECTED,) * len(wards)
        job = Job(version, keep, WRITTEN if self._shares(r) else SENDS, come)
        after = _with_rank(state, r, rank._replace(course=self._captured(rank.course, version), job=job))
        if 0 < state.differ_from <= version.step:
            after = after._replace(apart=state.apart | {version})
        return after._replace(held=held)

    def send(self, state: State, r: int, job: Job) -> State:
        """What is held alike is hashed, then the messages to the partners begin; at their end the own bytes are hashed.

        (The first of them hashes: the digest of all is known when any one has ended.)"""
        which = len(state.held[r]) - 1 if job.own == WRITTEN else OWN
        return self._shipped(state, r, _completed(state.held, r, which, job.version), job._replace(own=job.own + 1))

    def receive(self, state: State, r: int, job: Job, number: int) -> State | None:
        """A ward's message begins and ends, not before its sender has come as far. Nothing answers it."""
        sent, come = self._sent(state, self.cluster.wards[r][number], job), job.wards[number]
        if come == EXPECTED and min(job.own, sent) >= SENDS:
            held = self._write(state.held, r, 1 + number, job.version, job.keep)
        elif come == ARRIVES and sent == HASHED:
            held = _completed(state.held, r, 1 + number, job.version)
        else:
            return None
        return self._shipped(state, r, held, job._replace(wards=_put(job.wards, number, come + 1)))

    def _shipped(self, state: State, r: int, held: Holdings, job: Job) -> State:
        rank = state.ranks[r]
        ranks = _put(state.ranks, r, Rank(rank.doing, rank.course, rank.step, job))
        if self._in_all_places(held, job.version) and job.version not in state.apart:
            protected = max(job.version, state.protected or NOTHING)
            return state._replace(ranks=ranks, held=held, protected=protected, lost=frozenset())
        return state._replace(ranks=ranks, held=held)

    def cast(self, state: State, needs: tuple[float, ...]) -> State:
        """All ranks vote. The gate takes the minimum of each field."""
        complete = [self._complete(rank) for rank in state.ranks]
        steps = {rank.step for rank in state.ranks}
        if len(steps) > 1:
            raise Violation(f"ranks vote on different steps: {steps}")
        least = Version(min(v.epoch for v in complete), min(v.step for v in complete))
        captured = state.ranks[0].course.captured
        outcome = Numbers(least, max(needs), captured not in state.apart)
        return state._replace(vote=Vote(steps.pop() + 1, outcome, needs, None))

    def commit(self, state: State, r: int) -> State:
        rank, vote = state.ranks[r], state.vote
        assert vote is not None
        course = self._committed(rank.course, vote.step, vote.outcome, Numbers(self._complete(rank), vote.needs[r]))
        if vote.captures is not None and course.due != vote.captures:
            raise Violation(f"rank {r} decides otherwise than the others about capturing step {vote.step}")
        after = _with_rank(state, r, rank._replace(course=course, step=vote.step))
        if rank.course.captured is not None and course.captured is None:
            after = after._replace(differ_from=0)  # from the next version on, what differs is each rank's own
        pending = any(other.doing is RUNS and other.step < vote.step for other in after.ranks)
        after = after._replace(vote=vote._replace(captures=course.due) if pending else None)
        return after._replace(progress=max(after.progress, vote.step))

    def recover(self, state: State) -> State | None:
        """All ranks have met: they agree on what to resume, with nothing but what vaults and reports tell."""
        epoch = state.epoch + 1
        plan = self._plan(state, epoch)
        known = frozenset().union(*state.turns)
        newest = self.newest_whole(state.held, known, state.apart)
        nothing_was_lost = state.protected is not None and self.cluster.survives(state.lost)
        if isinstance(plan, StateLost):
            if nothing_was_lost or state.progress <= NOTHING_TO_LOSE_STEP:
                raise Violation(f"the state is lost: {plan.reason}")
            return None
        after = state._replace(epoch=epoch, failed=False)
        if isinstance(plan, StartOver):
            if plan.start != Start.FRESH:
                raise Violation(f"nobody is cold: {plan.reason}")
            if nothing_was_lost and state.protected.step > 0:
                raise Violation(f"training starts anew although {state.protected} was protected: {plan.reason}")
            # Every agent in the view knows that what was there before counts no more.
            turn = (epoch, NOTHING)
            begun = Rank(RUNS, self._begun(), 0, None)
            after = after._replace(ranks=(begun,) * len(state.ranks), protected=None, progress=0)
            after = after._replace(turns=tuple(turns | {turn} for turns in after.turns), turned=after.turned | {turn})
            after = after._replace(differ_from=0)
            if nothing_was_lost and state.epoch == 1:
                return after._replace(protected=Version(epoch, INITIAL))
            return after._replace(lost=frozenset())
        if is_void(plan.version, known | state.turned):
            raise Violation(f"the plan resumes {plan.version}, which is void: {sorted(known | state.turned)}")
        if plan.version != newest:
            raise Violation(f"the plan resumes {plan.version}, the newest that is whole is {newest}")
        self._check_fetches(state.held, plan)
        joins = tuple(Rank(JOINS, rank.course, plan.version.step, None) for rank in state.ranks)
        return after._replace(ranks=joins, plan=(plan.version, plan.keep))

    def resume(self, state: State, r: int) -> State:
        """One rank has the state, as all have; its agent remembers which version that was."""
        assert state.plan is not None
        version, keep = state.plan
        course = _known(self.rules.resumed(self._course(state.ranks[r].course), version, keep))
        after = _with_rank(state, r, Rank(RUNS, course, version.step, None))
        place, turn = self.cluster.places[r], (state.epoch, version)
        after = after._replace(turns=_put(after.turns, place, after.turns[place] | {turn}))
        if any(rank.doing is JOINS for rank in after.ranks):
            return after
        # Only now can a step be committed, and only now is anything void: nobody has acted on it before.
        return after._replace(turned=after.turned | {turn}, plan=None)

    # -- faults

    def hurt(self, state: State) -> Iterator[tuple[str, State]]:
        """Every fault that may still happen."""
        faults = state.faults
        if faults.partings and not state.failed and state.vote and state.vote.captures is None:
            less = state._replace(faults=faults._replace(partings=faults.partings - 1), differ_from=state.vote.step)
            yield f"ranks train step {state.vote.step} apart", less
        if faults.errors and not state.failed:
            yield "a connection breaks", self._fail(state._replace(faults=faults._replace(errors=faults.errors - 1)))
        if faults.crashes:
            less = state._replace(faults=faults._replace(crashes=faults.crashes - 1))
            for r, rank in enumerate(state.ranks):
                if rank.doing is not NEW:
                    yield f"rank {r} dies", self._fail(less, [r])
        for place in self.cluster.nodes:
            gone = state.lost | {place}
            if state.protected is not None and not self.cluster.survives(gone):
                continue  # more than its copies can stand
            if faults.losses:
                less = state._replace(faults=faults._replace(losses=faults.losses - 1))
                yield f"node {place} dies", self._lose(less, place, gone)
            for other in range(place) if faults.pairs else ():
                both = gone | {other}
                if state.protected is None or self.cluster.survives(both):
                    less = self._lose(state._replace(faults=faults._replace(pairs=faults.pairs - 1)), place, gone)
                    yield f"nodes {other} and {place} die at once", self._lose(less, other, both)
            if state.away and state.away.place == place:
                yield f"node {place} dies, the silent one comes back", self._lose(state, place, gone, state.away)
            if faults.silences and state.away is None:
                held = tuple(state.held[r] for r in self.cluster.ranks_of(place))
                away = Away(place, held, state.turns[place])
                less = state._replace(faults=faults._replace(silences=faults.silences - 1), away=away)
                yield f"node {place} falls silent", self._lose(less, place, gone)

    def _lose(self, state: State, place: int, gone: frozenset[int], instead: Away | None = None) -> State:
        held, local = state.held, self.cluster.ranks_of(place)
        for position, r in enumerate(local):
            held = _put(held, r, instead.held[position] if instead else tuple(EMPTY for _ in held[r]))
        turns = _put(state.turns, place, instead.turns if instead else frozenset())
        if instead:
            # A third fault in a row, on one node: nothing is promised until there is a protected version again.
            state, gone = state._replace(away=None), frozenset(self.cluster.nodes)
        return self._fail(state._replace(held=held, turns=turns, lost=gone), local)

    def _fail(self, state: State, dead: Sequence[int] = ()) -> State:
        """The round is over: the dead are replaced, the others stop; from now on no slot is written."""
        ranks = tuple(
            Rank(NEW, self._newcomer, 0, None)
            if r in dead or rank.doing is NEW
            else Rank(WAITS, self._newcomer._replace(interval=rank.course.interval), rank.step, None)
            for r, rank in enumerate(state.ranks)
        )
        return state._replace(failed=True, ranks=ranks, vote=None, plan=None)

    # -- invariants

    def check(self, state: State) -> None:
        """Whatever was protected is still there, and would be without any nodes that it was to outlive."""
        turns = frozenset().union(*state.turns)
        key = (state.held, turns, state.protected, state.lost, state.apart)
        if state.protected is None or state.protected.step == INITIAL or key in self._checked:
            return
        self._checked.add(key)
        for gone in self.cluster.losses:
            if not self.cluster.survives(state.lost | gone):
                continue
            held = state.held
            for place in gone:
                for r in self.cluster.ranks_of(place):
                    held = _put(held, r, tuple(EMPTY for _ in held[r]))
            newest = self.newest_whole(held, turns, state.apart)
            if newest is None or newest < state.protected:
                should = f", should node {' and '.join(map(str, sorted(gone)))} die now" if gone else ""
                raise Violation(f"{state.protected} was protected, and {newest} is the newest that is whole{should}")

    def newest_whole(
        self, held: Holdings, turns: frozenset[tuple[int, Version]], apart: frozenset[Version]
    ) -> Version | None:
        """By the words of the glossary, not by plan_recovery's way of computing it."""
        there: set[tuple[Version, Part, int]] = set()
        for r, pairs in enumerate(held):
            for part, pair in zip(self.cluster.parts[r], pairs, strict=True):
                for slot in pair:
                    if slot and slot[2]:
                        there.add((Version(slot[0], slot[1]), part, self.cluster.places[r]))
        for version in sorted({version for version, _, _ in there}, reverse=True):
            if is_void(version, turns) or version in apart:
                continue
            owns = all(
                any((version, Part.own(r), place) in there for place in self.cluster.nodes)
                for r in range(len(self.cluster.places))
            )
            if owns and all(
                any(self._has_all_of(there, version, members, place) for place in self.cluster.nodes)
                for members in self.cluster.shared
            ):
                return version
        return None

    def _has_all_of(
        self, there: set[tuple[Version, Part, int]], version: Version, members: tuple[int, ...], place: int
    ) -> bool:
        local = [r for r in members if self.cluster.places[r] == place]
        return bool(local) and all((version, self.cluster.parts[r][-1], place) in there for r in local)

    def _shares(self, r: int) -> bool:
        return len(self.cluster.parts[r]) > 1 + len(self.cluster.wards[r])

    def _in_all_places(self, held: Holdings, version: Version) -> bool:
        slot = (*version, True)
        return all(slot in pair for pairs in held for pair in (pairs[1:] if self.cluster.lean else pairs))

    def _check_fetches(self, held: Holdings, plan: Plan) -> None:
        """What a rank is told to take is there, complete, and all that it needs."""
        slot = (*plan.version, True)
        for r in range(len(held)):
            taken = plan.of(r)
            for fetch in taken:
                holders = self.cluster.ranks_of(int(fetch.node[1:]))
                if not any(
                    slot in pair
                    for holder in holders
                    for part, pair in zip(self.cluster.parts[holder], held[holder], strict=True)
                    if part == fetch.part
                ):
                    raise Violation(f"rank {r} is told to take {fetch.part} from {fetch.node}, which does not have it")
            wanted = {"own": 1}
            shared = [fetch.part for fetch in taken if fetch.part.kind == "shared"]
            if self._shares(r):
                wanted["shared"] = shared[0].num_pieces if shared else 1
            found = {kind: len({f.part for f in taken if f.part.kind == kind}) for kind in wanted}
            if found != wanted:
                raise Violation(f"rank {r} needs {wanted} parts and is told to take {found}")

    # -- details

    def _committed(self, known: Known, step: int, outcome: Numbers, mine: Numbers) -> Known:
        key = (known, step, outcome, mine)
        if key not in self._courses:
            self._courses[key] = _known(self.rules.committed(self._course(known), step, outcome, mine))
        return self._courses[key]

    def _captured(self, known: Known, version: Version) -> Known:
        if (known, version) not in self._courses:
            self._courses[known, version] = _known(self._course(known).captures(version))
        return self._courses[known, version]

    def _begun(self) -> Known:
        return _known(self._course(self._newcomer).begun())

    @functools.cached_property
    def _newcomer(self) -> Known:
        """What a process knows that has just started. (Of one that waits for a round only the interval may matter.)"""
        return Known(None, None, False, Interval() if self.cluster.needs else None)

    def _course(self, known: Known) -> Course:
        kept, captured, due, interval = known
        every = self.cluster.every if interval is None else interval.every
        return Course(every, kept, captured, due, interval=interval)

    def _plan(self, state: State, epoch: int) -> Plan | StartOver | StateLost:
        turns = frozenset().union(*state.turns)
        reports = tuple((rank.doing is NEW, 0 if rank.doing is NEW else rank.step) for rank in state.ranks)
        key = (epoch, state.held, turns, reports, state.progress, state.apart)
        if key not in self._plans:
            info = RoundInfo("run", "nonce", epoch, Start.IN_PLACE, "a fault", self.cluster.workers, state.progress)
            told = {r: RankReport(r, new, 9, step) for r, (new, step) in enumerate(reports)}
            lineage = [Lineage(at, version) for at, version in sorted(turns)]
            records = self._records(state.held, state.apart)
            self._plans[key] = self.rules.plan(info, told, records, lineage, num_losses=self.cluster.num_losses)
        return self._plans[key]

    def _records(self, held: Holdings, apart: frozenset[Version]) -> list[SlotRecord]:
        out = []
        for r, pairs in enumerate(held):
            for which, pair in enumerate(pairs):
                part = self.cluster.parts[r][which]
                num_sets = int(self._shares(r)) if part.kind == "own" else 0
                for index, slot in enumerate(pair):
                    version = self.rules.header(slot)
                    number = 100 * r + 10 * which + index
                    node = f"n{self.cluster.places[r]}"
                    balance = int(part == Part.own(0) and version in apart)  # the others' is 0
                    out.append(SlotRecord(node, number, part, version, 1, str(version), num_sets, balance))
        return out

    def _write(self, held: Holdings, r: int, which: int, version: Version, keep: Version | None) -> Holdings:
        pair = held[r][which]
        index = self.rules.next_slot((self.rules.header(pair[0]), self.rules.header(pair[1])), keep)
        return _put(held, r, _put(held[r], which, _put(pair, index, (*version, False))))

    def _sent(self, state: State, r: int, job: Job) -> int:
        """How far rank ``r`` is with sending the version that its partner expects."""
        other = state.ranks[r].job
        if other is None or (other.version < job.version and other.done):
            return -1  # has not come to this version yet
        if other.version != job.version:
            raise Violation(f"rank {r} ships {other.version} to a rank that ships {job.version}")
        return other.own

    def _complete(self, rank: Rank) -> Version:
        return rank.job.version if rank.job and rank.job.done else NOTHING


def is_void(version: Version, turns: frozenset[tuple[int, Version]]) -> bool:
    """Whether a later round went back behind it. Nothing is behind the initial state: all it says is to start anew."""
    return version.step > 0 and any(version.epoch < epoch and version > resumed for epoch, resumed in turns)


def _known(course: Course) -> Known:
    return Known(course.kept, course.captured, course.due, course.interval)


def _put(items: tuple, index: int, item: object) -> tuple:
    return (*items[:index], item, *items[index + 1 :])


def _with_rank(state: State, r: int, rank: Rank) -> State:
    return state._replace(ranks=_put(state.ranks, r, rank))


def _completed(held: Holdings, r: int, which: int, version: Version) -> Holdings:
    pair = held[r][which]
    slots = tuple((*version, True) if slot == (*version, False) else slot for slot in pair)
    return _put(held, r, _put(held[r], which, slots))


MAX_FAIR_STEPS = 3  # beyond the bound, until the newest is protected


@dataclass(frozen=True, slots=True)
class Explored:
    num_states: int
    num_moves: int
    num_recoveries: int


@dataclass(slots=True)
class _Graph:
    """States in the order in which they were found. ``parents``: whence, and by which move; ``fair``: the state that
    a run without faults comes to next, -1 where it may end or is followed no further."""

    numbers: dict[State, int] = field(default_factory=dict)
    states: list[State] = field(default_factory=list)
    parents: list[tuple[int, str]] = field(default_factory=list)
    fair: dict[int, int] = field(default_factory=dict)

    def add(self, state: State, parent: int, label: str) -> int:
        number = self.numbers.setdefault(state, len(self.states))
        if number == len(self.states):
            self.states.append(state)
            self.parents.append((parent, label))
        return number

    def way_to(self, number: int) -> list[str]:
        way = []
        while number > 0:
            number, label = self.parents[number]
            way.append(label)
        return way[::-1]


def explore(cluster: Cluster, rules: Rules | None = None, *, max_states: int = 10**7) -> Explored:
    """Every state that can be reached, the nearest first. Raises Violation, with the way to it."""
    collecting = gc.isenabled()
    gc.disable()  # nothing here refers to itself, and millions of tuples are slow to look through
    try:
        return _explore(Model(cluster, rules or Rules()), max_states)
    finally:
        if collecting:
            gc.enable()


def _explore(model: Model, max_states: int) -> Explored:
    graph, max_step = _Graph(), model.cluster.max_step
    graph.add(model.first(), 0, "")
    num_moves = num_recoveries = number = 0
    while number < len(graph.states):
        if number == max_states:
            raise RuntimeError(f"more than {max_states} states: bound the exploration")
        state, label = graph.states[number], ""
        beyond = max(state.ranks[0].step, state.vote.step if state.vote else 0) - max_step
        goal = newest_is_protected(state)
        try:
            model.check(state)
            if beyond > MAX_FAIR_STEPS:
                raise Violation(f"{beyond} steps without a fault, and the newest is never protected")
            moves = model.moves(state)
            if beyond > 0 or (model.cluster.brief and not any(state.faults)):
                # Far enough: from here on only what shows that the newest step becomes protected.
                moves = itertools.islice(moves, 0 if goal else 1)
            for label, after in moves:
                following = -1
                if after is not None and not (goal and after.vote and after.vote.step > max_step):
                    following = graph.add(model.representative(after), number, label)
                graph.fair.setdefault(number, following)
                num_moves += 1
                num_recoveries += state.failed
            if number not in graph.fair and not goal:
                raise Violation("nothing can happen any more")
            for label, after in model.hurt(state) if beyond <= 0 else ():
                graph.add(model.representative(after), number, label)
                num_moves += 1
        except Violation as error:
            raise Violation("\n".join([*graph.way_to(number), label, f"=> {error}"])) from error
        number += 1
    _check_protects(graph)
    return Explored(number, num_moves, num_recoveries)


def _check_protects(graph: _Graph) -> None:
    """From every state, without another fault, the newest step becomes protected: fair runs do not go in circles."""
    seen_from = [-1] * len(graph.states)
    for start in range(len(graph.states)):
        number = start
        while number >= 0 and seen_from[number] < 0 and not newest_is_protected(graph.states[number]):
            seen_from[number] = start
            number = graph.fair[number]
        if number >= 0 and seen_from[number] == start:
            raise Violation("\n".join([*graph.way_to(start), "=> without a fault, moves go in circles"]))


def newest_is_protected(state: State) -> bool:
    return state.vote is None and all(
        rank.doing is RUNS
        and rank.job
        and rank.job.done
        and rank.job.version == (state.epoch, rank.step)
        and rank.job.version not in state.apart
        for rank in state.ranks
    )
