"""A large run in simulation: what members send between views, and how long a death takes to become the next view.

In: a number of members. Out: messages and bytes per member and second, those of the busiest one, and seconds of
protocol time from a crash until all know of it and until all have the next view. The protocol core is the real one, on
a network with delays of 0.2 to 2 ms. Beyond MAX_CORES members the others are stand-ins that answer, probe and hand on
gossip as the protocol says and keep no table; the figures are those of the real ones.
Limits: computing takes no time here, and bandwidth is unlimited: `next_view_bytes` tells what the proposer sends.
"""

import heapq
import itertools
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from rendezvous import effects as out
from rendezvous import events
from rendezvous.config import Config
from rendezvous.core import Core
from rendezvous.messages import (
    Accept,
    AcceptDelta,
    AcceptedVote,
    Ack,
    Beat,
    Decided,
    DecidedDelta,
    Gossip,
    IndirectAck,
    Message,
    Ping,
    PingRequest,
    Prepare,
    Promise,
    Status,
    Update,
)
from rendezvous.rumours import FANOUT
from rendezvous.types import Member, MemberKey, PassiveApplication, View
from rendezvous.wire import Envelope, encode

MAX_CORES = 1000
CORES_AMONG_STAND_INS = 20
NUM_CONNECTIONS = 128  # a crash breaks as many of its connections
RUN = "simulation"
DEADLINE_S = 60.0


class Application(PassiveApplication):
    def ballot(self) -> dict[str, Any]:
        return {"step": 1000}

    def progress(self) -> Mapping[str, Any]:
        return {"step": 1000, "age_s": 0.25}


class LargeRun:
    """Members 0 to `num_cores` - 1 are real; the last member is the one that crashes."""

    def __init__(self, size: int, seed: int = 1) -> None:
        self.size = size
        self.num_cores = size if size <= MAX_CORES else CORES_AMONG_STAND_INS
        self.now = 0.0
        self._rng = random.Random(seed)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._dead: set[int] = set()
        self.num_messages = [0] * self.num_cores
        self.num_bytes = [0] * self.num_cores
        self._sizes: dict[int, tuple[Message, int]] = {}
        self.members = [Member(f"node{i}", 1, f"10.{i >> 16}.{i >> 8 & 255}.{i & 255}:7000") for i in range(size)]
        self._index = {member.address: index for index, member in enumerate(self.members)}
        self._informed: dict[int, dict[MemberKey, tuple[Update, int]]] = {}
        self.learned_s: dict[int, float] = {}
        self.knows_s: dict[int, float] = {}
        self.view = View("nonce", 1, 1, tuple(self.members), (), (), "the run starts")
        self.cores = [self._core(member) for member in self.members[: self.num_cores]]
        self._due_s = [0.0] * self.num_cores
        for index in range(self.num_cores):
            self._schedule_tick(index)
            if self.num_cores < size:
                self._schedule_probe(index)
        self._timing = self.cores[0].config.timing

    def _core(self, member: Member) -> Core:
        config = Config(RUN, member.name, member.address, num_nodes_min=self.size // 2, num_nodes_max=self.size)
        core = Core(member, config, Application(), random.Random(self._rng.random()), 0.0)
        other = self.members[1 if member is self.members[0] else 0]
        core.step(events.Received(Envelope(RUN, "", other.key, other.address, None, Decided(self.view))), 0.0)
        while core.membership.take_news(4096):
            pass  # all have known each other for long
        return core

    # -- running

    def run_until(self, until_s: float, done: Callable[[], bool] = lambda: False) -> None:
        while self._queue and self._queue[0][0] <= until_s and not done():
            self.now, _, action = heapq.heappop(self._queue)
            action()

    def _at(self, at_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (at_s, next(self._order), action))

    def _soon(self, action: Callable[[], None]) -> None:
        self._at(self.now + self._rng.uniform(0.0002, 0.002), action)

    def _schedule_tick(self, index: int) -> None:
        due_s = max(self.cores[index].next_deadline_s(), self.now + 1e-4)
        if self._due_s[index] <= self.now or due_s < self._due_s[index]:
            self._due_s[index] = due_s
            self._at(due_s, lambda: self._tick(index, due_s))

    def _tick(self, index: int, due_s: float) -> None:
        if self._due_s[index] == due_s:
            self._due_s[index] = 0.0
            self._step(index, events.Tick())

    def _step(self, index: int, event: events.Event) -> None:
        if index in self._dead:
            return
        for effect in self.cores[index].step(event, self.now):
            match effect:
                case out.Send():
                    self._count(index, effect)
                    self._send(self._index[effect.address], index, effect.message)
                case out.Dial():
                    target = self._index[effect.address]
                    refused = events.Dialed(effect.address, target in self._dead)
                    self._soon(lambda refused=refused: self._step(index, refused))
                case out.Installed():
                    self.learned_s.setdefault(index, self.now)
                case out.Changed() if effect.change.member is self.members[-1]:
                    self.knows_s[index] = self.now
                case _:
                    pass
        self._schedule_tick(index)

    def _count(self, index: int, effect: out.Send) -> None:
        message = effect.message
        known = self._sizes.get(id(message))
        if known is None or known[0] is not message:
            me = self.members[index]
            size = len(encode(Envelope(RUN, "nonce", me.key, me.address, effect.to, message)))
            known = message, size
            if size > 10_000:
                self._sizes[id(message)] = known  # the same for all receivers
        self.num_messages[index] += 1
        self.num_bytes[index] += known[1]

    def _send(self, target: int, sender: int, message: Message) -> None:
        if target in self._dead:
            return
        if target < self.num_cores:
            who = self.members[sender]
            envelope = Envelope(RUN, "nonce", who.key, who.address, self.members[target].key, message)
            self._soon(lambda: self._step(target, events.Received(envelope)))
        else:
            self._soon(lambda: self._stand_in(target, sender, message))

    # -- stand-ins

    def _schedule_probe(self, index: int) -> None:
        """Each member is probed by as many others as it probes."""
        timing = self.cores[index].config.timing
        self._at(self.now + self._rng.expovariate(4 / timing.probe_interval_s), lambda: self._probe(index))

    def _probe(self, index: int) -> None:
        prober = self._rng.randrange(self.num_cores, self.size - 1)
        self._send(index, prober, Ping(0, self._beat(prober)))
        self._schedule_probe(index)

    def _beat(self, index: int) -> Beat:
        updates = tuple(update for update, _ in self._informed.get(index, {}).values())
        return Beat(2 if index in self.learned_s else 1, 0, updates)

    def _stand_in(self, index: int, sender: int, message: Message) -> None:
        match message:
            case Ping():
                self._inform(index, message.beat.updates)
                self._send(sender, index, Ack(message.seq, self._beat(index)))
            case Ack():
                self._inform(index, message.beat.updates)
            case PingRequest():
                if self._index_of(message.target) not in self._dead:
                    self._send(sender, index, IndirectAck(message.seq, message.target))
            case Gossip():
                self._inform(index, message.updates)
            case Prepare():
                self._send(sender, index, Promise(message.epoch, message.ballot, True, None, {"step": 1000}))
            case Accept() | AcceptDelta():
                self._send(sender, index, AcceptedVote(message.epoch, message.ballot))
            case Decided() | DecidedDelta():
                self.learned_s.setdefault(index, self.now)
            case _:
                pass

    def _index_of(self, key: MemberKey) -> int:
        return int(key.name.removeprefix("node"))

    def _inform(self, index: int, updates: tuple[Update, ...]) -> None:
        held = self._informed.setdefault(index, {})
        fresh = [u for u in updates if u.member.key not in held or held[u.member.key][0].status < u.status]
        for update in fresh:
            held[update.member.key] = update, 3 * self.size.bit_length() // FANOUT
            if update.member is self.members[-1] or update.member == self.members[-1]:
                self.knows_s.setdefault(index, self.now)
        if fresh:
            self._at(self.now + self._timing.rumour_s, lambda: self._hand_on(index))

    def _hand_on(self, index: int) -> None:
        left = {key: (update, times) for key, (update, times) in self._informed[index].items() if times > 0}
        if not left:
            return
        for target in self._rng.sample(range(self.size), FANOUT):
            self._send(target, index, Gossip(tuple(update for update, _ in left.values())))
        for key, (update, times) in left.items():
            self._informed[index][key] = update, times - 1
        self._at(self.now + self._timing.rumour_s, lambda: self._hand_on(index))

    # -- the fault

    def crash_last(self) -> None:
        """The connections of the last member break; whoever had one looks whether somebody still listens there."""
        victim = self.members[-1]
        self._dead.add(self.size - 1)
        connected = self._rng.sample(range(self.size - 1), min(self.size - 1, NUM_CONNECTIONS))
        gone = Update(victim, Status.GONE, 0, "its agent is not running: connection refused", True, "a stand-in")
        for index in connected:
            if index < self.num_cores:
                self._soon(lambda index=index: self._step(index, events.ConnectionLost(victim.address)))
            else:
                self._soon(lambda index=index: self._inform(index, (gone,)))


def measure(size: int, steady_s: float) -> dict[str, Any]:
    """The figures for a run of `size` members, after `steady_s` seconds of protocol time without a fault."""
    began_s = time.monotonic()
    run = LargeRun(size)
    run.run_until(2.0)  # probes begin all at once; let them spread
    run.num_messages = [0] * run.num_cores
    run.num_bytes = [0] * run.num_cores
    run.run_until(2.0 + steady_s)
    messages, sent_bytes = list(run.num_messages), list(run.num_bytes)
    run.learned_s.clear()
    crashed_s = run.now
    run.crash_last()
    survivors = range(min(run.num_cores, size - 1))
    run.run_until(crashed_s + DEADLINE_S, lambda: all(index in run.learned_s for index in survivors))
    if not all(index in run.learned_s for index in survivors):
        raise RuntimeError(f"{size} members: not everybody had the next view {DEADLINE_S:g} s after a crash")
    most_sent = max(after - before for after, before in zip(run.num_bytes, sent_bytes, strict=True))
    return {
        "messages_per_member_s": sum(messages) / len(messages) / steady_s,
        "bytes_per_member_s": sum(sent_bytes) / len(sent_bytes) / steady_s,
        "busiest_messages_s": max(messages) / steady_s,
        "busiest_bytes_s": max(sent_bytes) / steady_s,
        "death_known_s": max(run.knows_s.get(index, run.learned_s[index]) for index in survivors) - crashed_s,
        "next_view_s": max(run.learned_s[index] for index in survivors) - crashed_s,
        "next_view_bytes": most_sent,
        "cores": run.num_cores,
        "wall_s": time.monotonic() - began_s,
    }
