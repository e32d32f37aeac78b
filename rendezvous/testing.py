"""A simulated network for the real protocol core: seeded, with a manual clock, and faults written as data.

Flows in: a seed, members, a schedule of faults. Flows out: the same run every time; `InvariantViolation` at the first
event after which something that must never happen has happened (referee.py, invariants.py).
Invariants: the same seed gives the same events, whatever the process and its hash seed.
Each life of an agent has a clock of its own: another zero, and up to 2 % fast or slow.
Limits: messages are handed over as values (wire.py is tested by itself).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from rendezvous import effects as out
from rendezvous import events
from rendezvous.config import Config, Timing
from rendezvous.core import Core
from rendezvous.faults import Fault
from rendezvous.messages import AcceptedVote, Beat, Fence, FenceAnswer, Ping, Promise, Standing, Status
from rendezvous.referee import Referee
from rendezvous.simulated_network import SimulatedNetwork
from rendezvous.simulated_node import Clock, SimulatedApplication, SimulatedNode, name_on, twin_of
from rendezvous.types import Member, MemberKey, Role
from rendezvous.wire import Envelope

_OPERATOR, _OPERATOR_AT = MemberKey("operator", 1), "127.0.0.1:7000"

NUM_CONTACTS = 3  # of the nodes, that everybody is told


def _decides(event: events.Event) -> bool:
    """Can this event complete a decision here, rather than bring one that was made elsewhere?"""
    return not isinstance(event, events.Received) or isinstance(event.envelope.message, AcceptedVote | Promise)


class Simulation:
    """A cluster in memory. `run_until` advances it; `nodes` holds the newest life on each host."""

    def __init__(
        self,
        seed: int,
        names: Sequence[str],
        schedule: Sequence[Fault] = (),
        *,
        num_nodes_min: int = 2,
        num_nodes_max: int = 2,
        witnesses: Sequence[str] = (),
        timing: Timing | None = None,
        start_s: Mapping[str, float] | None = None,
        fencing_command: bool = False,
        service_s: float = 0.0,
        core_type: Callable[..., Core] = Core,
    ) -> None:
        self._rng = random.Random(seed)
        self._core_type = core_type
        self._sizes = (num_nodes_min, num_nodes_max, len(names) - num_nodes_max, len(witnesses))
        self._timing = timing or Timing(0.15, 1.2)
        self._lives = itertools.count(1)
        self._witnesses = frozenset(witnesses)
        self._fencing_command = fencing_command
        self._service_s = service_s
        hosts = (*names, *witnesses)
        twins = tuple(dict.fromkeys(twin_of(fault.who) for fault in schedule if fault.kind == "twin"))
        self._network = SimulatedNetwork((*hosts, *twins), self._rng)
        self._referee = Referee(seed, tuple(schedule), len(names) + len(witnesses), (num_nodes_min, num_nodes_max))
        self.decided, self.vouched = self._referee.decided, self._referee.vouched
        self.coverage, self.trace = self._referee.coverage, self._referee.trace
        self._answer: FenceAnswer | None = None
        self._ambush = ""
        self._strikes: list[str] = []
        self._is_calm = False
        self.num_events = 0
        self.nodes: dict[str, SimulatedNode] = {}
        self.dead: list[SimulatedNode] = []
        for name in hosts:
            at_s = (start_s or {}).get(name, self._rng.uniform(0.0, 0.3))
            self._network.at(at_s, partial(self._start, name))
        for fault in schedule:
            self._network.at(fault.at_s, partial(self._apply, fault))

    # -- running ----------------------------------------------------------------------------------------------------

    def run_until(self, until_s: float) -> None:
        self._network.run_until(until_s)

    def has_converged(self) -> bool:
        return self._referee.what_is_apart(self.live()) is None

    def check_converged(self) -> None:
        self._referee.check_converged(self.live())

    def calm(self) -> None:
        """End every fault: links whole, nobody paused, no loss. Where no contact is left, others are named to all."""
        self._network.cuts.clear()
        self._network.loss = 0.0
        self._ambush = ""
        self._strikes.clear()
        self._is_calm = True
        for name in self.nodes:
            self._resume(name)
        contacts = list(self._network.addresses)[:NUM_CONTACTS]
        if not any(node.host in contacts for node in self.live()):
            for node in self.live():
                self._step(node, events.Contacts(tuple(self._network.addresses.values())))

    def live(self) -> list[SimulatedNode]:
        return [node for node in self.nodes.values() if node.running and not node.evicted and not node.left]

    def _start(self, host: str, rejoin: bool = False) -> None:
        low, high, num_spares, num_witnesses = self._sizes
        config = Config(
            run_id="simulation",
            name=name_on(host),
            bind=self._network.addresses[host],
            contacts=tuple(self._network.addresses.values())[:NUM_CONTACTS],
            role=Role.WITNESS if name_on(host) in self._witnesses else Role.NODE,
            num_nodes_min=low,
            num_nodes_max=high,
            num_spares_expected=num_spares,
            num_witnesses_expected=num_witnesses,
            first_view_last_call_s=1.0,
            rejoin=rejoin,
            probe_interval_s=self._timing.probe_interval_s,
            failure_s=self._timing.failure_s,
        )
        member = Member(config.name, next(self._lives), config.bind, config.role)
        clock = Clock(self._rng.uniform(0.0, 1000.0), self._rng.uniform(0.98, 1.02))
        core = self._core_type(
            member, config, SimulatedApplication(self._rng), self._rng, clock.local_s(self._network.now)
        )
        node = SimulatedNode(host, member, core, clock, rejoin)
        self.nodes[host] = node
        self._note(f"{member.key} starts")
        self._step(node, events.Contacts(config.contacts))

    def _step(self, node: SimulatedNode, event: events.Event) -> None:
        if not node.running:
            return
        if node.paused:
            node.backlog.append(event)
            return
        if isinstance(event, events.Tick):
            node.tick_waits = False
        before = node.core.agreement.last_accepted
        self.num_events += 1
        effects = node.core.step(event, node.clock.local_s(self._network.now))
        held = node.core.agreement.last_accepted
        if held is not None and held is not before:
            self._referee.accepts(node, held)
        if self._ambush and _decides(event) and any(isinstance(effect, out.Installed) for effect in effects):
            effects = [effect for effect in effects if not isinstance(effect, out.Send)]
            self._spring_ambush(node)
        if self._strikes and node.core.agreement.proposal is not None:
            self._network.after(0.0, 0.03, partial(self._strike, self._strikes.pop(0), node))
        for effect in effects:
            self._perform(node, effect)
        self._schedule_tick(node)

    def _spring_ambush(self, node: SimulatedNode) -> None:
        kind, self._ambush = self._ambush, ""
        self._note(f"{node.member.key} falls into the {kind}")
        if kind == "ambush_crash":
            self.crash(node.host)
        else:
            self._network.cut(frozenset((node.host,)))

    def _strike(self, kind: str, proposer: SimulatedNode) -> None:
        """Hit a decision while it is being made; if it was made meanwhile, wait for the next one."""
        if self._is_calm:
            return
        if not any(node.core.agreement.proposal is not None for node in self.live()):
            self._strikes.append(kind)
            return
        self.coverage[kind] += 1
        names = sorted(node.host for node in self.live())
        if kind == "strike_cut":
            self._network.cut(frozenset(self._rng.sample(names, max(1, self._rng.randint(1, len(names)) // 2))))
        else:
            self.crash(proposer.host if self._rng.random() < 0.5 else self._rng.choice(names))

    def _schedule_tick(self, node: SimulatedNode) -> None:
        if node.tick_waits:
            return
        now = self._network.now
        due_s = max(node.clock.global_s(node.core.next_deadline_s()), now + 1e-4)
        if node.next_tick_s <= now or due_s < node.next_tick_s:
            node.next_tick_s = due_s
            self._network.at(due_s, partial(self._tick, node, due_s))

    def _tick(self, node: SimulatedNode, due_s: float) -> None:
        if node.next_tick_s == due_s and not node.paused and not node.tick_waits:
            node.next_tick_s = 0.0
            node.tick_waits = True
            self._serve(node, events.Tick())

    def _perform(self, node: SimulatedNode, effect: out.Effect) -> None:
        match effect:
            case out.Send():
                self._send(node, effect)
            case out.Dial():
                self._dial(node, effect.address)
            case out.AskFence():
                if self._fencing_command:
                    self._ask_fence(node, effect.member)
            case out.Installed():
                self._referee.learns(node, effect.view, effect.member, self._network.now)
            case out.Evicted():
                self._note(f"{node.member.key} is evicted: {effect.reason}")
                self.coverage["evicted"] += 1
                node.evicted = True
            case out.Changed():
                proof = " with proof" if effect.change.proof else ""
                self.coverage[f"member {effect.change.kind}{proof}"] += 1
                self._note(f"{node.member.key}: {effect.change.member.key} {effect.change.kind} {effect.change.reason}")
            case out.Waiting():
                self.coverage[f"waits: {effect.reason.rpartition(': ')[2].split(';')[0]}"] += 1
                self._note(f"{node.member.key} waits: {effect.reason}")
            case _:
                pass

    # -- the network ------------------------------------------------------------------------------------------------

    def _send(self, node: SimulatedNode, effect: out.Send) -> None:
        if isinstance(effect.message, FenceAnswer):
            self._answer = effect.message
            return
        target, sender = self._network.name_at(effect.address), node.member
        if self._network.loses(node.host, target):
            return
        envelope = Envelope("simulation", node.core.nonce, sender.key, sender.address, effect.to, effect.message)
        self._network.carry(partial(self._deliver, target, events.Received(envelope)))

    def _deliver(self, target: str, event: events.Event) -> None:
        node = self.nodes.get(target)
        if node is not None:
            self._serve(node, event)

    def _serve(self, node: SimulatedNode, event: events.Event) -> None:
        """A slow host deals with one event after the other, each of which takes it `service_s` on average."""
        if self._service_s == 0.0:
            self._step(node, event)
            return
        node.busy_until_s = max(self._network.now, node.busy_until_s) + self._rng.expovariate(1 / self._service_s)
        self._network.at(node.busy_until_s, partial(self._step, node, event))

    def _dial(self, node: SimulatedNode, address: str) -> None:
        network, name = self._network, node.host
        target = network.name_at(address)
        reachable = network.passes(name, target) and network.passes(target, name)
        listener = self.nodes.get(target)
        refused = reachable and (listener is None or not listener.running)
        delay_s = self._rng.uniform(0.0005, 0.01) if reachable else self._timing.dial_s
        network.at(network.now + delay_s, partial(self._step, node, events.Dialed(address, refused)))

    def _ask_fence(self, node: SimulatedNode, about: Member) -> None:
        """A scheduler that knows the truth and takes its time."""
        gone = any(dead.member.key == about.key for dead in self.dead)
        event = events.FenceAnswered(about.key, Status.GONE if gone else None, "the scheduler says so")
        self.coverage[f"fencing command: {'gone' if gone else 'not gone'}"] += 1
        self._network.after(0.01, 0.2, partial(self._step, node, event))

    # -- faults -----------------------------------------------------------------------------------------------------

    def _apply(self, fault: Fault) -> None:
        self._note(f"fault: {fault}")
        match fault.kind:
            case "crash":
                self.crash(fault.who)
            case "restart":
                self._restart(fault.who)
            case "pause":
                if fault.who in self.nodes:
                    self.nodes[fault.who].paused = True
            case "resume":
                self._resume(fault.who)
            case "cut":
                here, _, there = fault.who.partition("|")
                self._network.cut(frozenset(here.split(",")), frozenset(there.split(",")) if there else None)
            case "cut_one_way":
                self._network.cut_one_way(fault.who.partition(",")[0])
            case "ambush" | "ambush_crash":
                self._ambush = fault.kind
            case "strike_cut" | "strike_crash":
                self._strikes.append(fault.kind)
            case "heal":
                self._ambush = ""
                self._network.cuts.clear()
            case "assume_dead":
                self._assume_dead(fault.who)
            case "loss":
                self._network.loss = fault.amount
            case "calm":
                self._network.loss = 0.0
            case "misspeak":
                self._misspeak(fault.who)
            case "twin":
                self._start_twin(fault.who)
            case "propose":
                self._command(fault.who, events.Propose("the schedule says so"))
            case "leave":
                self._command(fault.who, events.Leave("the schedule says so"))
                if fault.who in self.nodes:
                    self.nodes[fault.who].left = True
            case _:
                raise ValueError(f"unknown fault {fault.kind!r}")

    def _misspeak(self, name: str) -> None:
        """A member whose memory is damaged says once, to everybody, that it knows a view that does not exist."""
        node = self.nodes.get(name)
        if node is None or not node.running or node.core.newest is None:
            return
        self.coverage["misspoke"] += 1
        beat = Beat(node.core.newest.epoch + 2**32, node.core.membership.own.refutation)
        for other in self.live():
            if other is not node:
                self._send(node, out.Send(other.member.address, other.member.key, Ping(0, beat)))

    def _start_twin(self, name: str) -> None:
        """A second node is given a name that is taken, once no node may vote in a first view any more.

        Before, names are all that a first view can count, and only who has met both knows that they are two.
        """
        nodes = [node for node in self.nodes.values() if node.running and not node.rejoins]
        if not self.decided or any(node.core.newest is None for node in nodes):
            self._network.after(0.05, 0.15, partial(self._start_twin, name))
        elif twin_of(name) not in self.nodes:
            self.coverage["twin"] += 1
            self._start(twin_of(name))

    def _assume_dead(self, who: str) -> None:
        """An operator tells a member that knows the newest view and does not hear from this one.

        Not told of a member that can still decide something with others: it is no honest word then.
        """
        name, _, told = who.partition("|")
        target = self.nodes.get(name)
        newest = self._referee.newest_decided()
        if target is None or newest is None or target.member.key not in newest.keys:
            return
        group = {n.host for n in self.live() if not n.paused and self._network.passes(name, n.host)}
        if target.running and not target.paused and 2 * len(group | {name}) > len(newest.members):
            return
        knowing = [n for n in self.live() if n.core.newest == newest and not n.paused and n.host not in group]
        for node in self._rng.sample(knowing, len(knowing)):
            if told and node.host != told:
                continue
            message = Fence(name, "the schedule says so", sure=True)
            self.vouched.add(target.member.key)
            self._answer = None
            self._step(node, events.Received(Envelope("simulation", "", _OPERATOR, _OPERATOR_AT, None, message)))
            answer: FenceAnswer | None = self._answer
            if answer is not None and answer.standing is Standing.ASSUMED_DEAD:
                self._note(f"{node.member.key} was told: {answer.text}")
                self.coverage["assumed dead"] += 1
                return
            self.vouched.discard(target.member.key)

    def crash(self, name: str) -> None:
        """The process ends at once; who can still hear from that host sees its connections break."""
        node = self.nodes.get(name)
        if node is None or not node.running:
            return
        node.running = False
        self.dead.append(node)
        for other in self.nodes.values():
            if self._network.passes(name, other.host):
                event = events.ConnectionLost(node.member.address)
                self._network.after(0.0005, 0.01, partial(self._step, other, event))

    def _restart(self, name: str) -> None:
        """A new incarnation at the same address, which says that it is none of the first."""
        node = self.nodes.get(name)
        if node is not None and not node.running:
            self._start(name, rejoin=True)

    def _resume(self, name: str) -> None:
        node = self.nodes.get(name)
        if node is None or not node.paused:
            return
        node.paused = False
        backlog, node.backlog = node.backlog, []
        for event in backlog:
            self._step(node, event)
        self._step(node, events.Tick())

    def _command(self, name: str, event: events.Event) -> None:
        node = self.nodes.get(name)
        if node is not None and node.running:
            self._step(node, event)

    def _note(self, text: str) -> None:
        self._referee.note(self._network.now, text)
