"""Failure detection in SWIM's shape: probe, indirect probe, suspicion; and proof by a refused connection. Pure.

Flows in: ticks, acks, lost connections, results of connection checks. Flows out: probes to send, connections to try,
and judgements in the membership table.
Invariants: silence leads to SUSPECT first and never to proof; only a refused connection at an address that the member
declares its host's own is proof; time during which this node itself was stalled counts against nobody.
What a member sends between failures does not depend on how many there are: it probes NUM_TARGETS others in each probe
interval, and so is probed by as many on average.
Where all are slow, none adds to it: who gets its answers late probes less often, asks fewer for help and waits longer.
Limits: in a large group a member may be probed by nobody for an interval or two, which adds to the time until its
silence is noticed.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from rendezvous.config import Timing
from rendezvous.effects import Dial, Forget, Outbox
from rendezvous.membership import Membership, Record
from rendezvous.messages import Ack, Beat, IndirectAck, Ping, PingRequest, Status
from rendezvous.types import MemberKey

NUM_TARGETS = 4
NUM_RELAYS = 3
NUM_CONFIRMING = 6
MAX_HEALTH = 4
_MAX_OVERDUE = 256
# A dying process closes its connections before its listening socket: a check may come too early, so it is repeated.
_REDIAL_S = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)


@dataclass(slots=True)
class _Probe:
    target: MemberKey
    sent_s: float
    asked_others: bool = False


@dataclass(slots=True)
class _Relay:
    requester: MemberKey
    seq: int
    target: MemberKey
    until_s: float


@dataclass(slots=True)
class _Check:
    num_dials: int
    next_s: float


class Detector:
    """Schedules probes over the membership table. `health` > 0 means this node itself is slow and judges later."""

    def __init__(
        self,
        membership: Membership,
        timing: Timing,
        beat: Callable[[Record], Beat],
        rng: random.Random,
        out: Outbox,
        now: float,
    ) -> None:
        self._membership = membership
        self._timing = timing
        self._beat = beat
        self._rng = rng
        self._out = out
        self._seq = 0
        self._probes: dict[int, _Probe] = {}
        self._overdue: deque[int] = deque(maxlen=_MAX_OVERDUE)  # of probes without an answer
        self._relays: dict[int, _Relay] = {}
        self._checks: dict[MemberKey, _Check] = {}
        self._order: list[MemberKey] = []
        self._next_probe_s = now
        self._num_refuted = 0
        self._lateness: set[bool] = set()  # of the answers since the last round of probes
        self.health = 0

    def next_deadline_s(self) -> float:
        due_s = self._next_probe_s
        for check in self._checks.values():
            due_s = min(due_s, check.next_s)
        for probe in self._probes.values():
            due_s = min(due_s, self._probe_deadline_s(probe))
        return due_s

    def postpone(self, by_s: float, now: float) -> None:
        """This node was stalled: probes in flight say nothing, suspicions last longer."""
        self._probes.clear()
        self._next_probe_s = now
        self.health = min(MAX_HEALTH, self.health + 1)
        for record in self._membership.suspects.values():
            assert record.suspicion is not None
            record.suspicion.postpone(by_s)

    def tick(self, now: float) -> None:
        if self._membership.refuted > self._num_refuted:
            # Somebody took this node for dead: it may be too slow to judge others quickly.
            self._num_refuted = self._membership.refuted
            self.health = min(MAX_HEALTH, self.health + 1)
        self._end_suspicions(now)
        self._follow_probes(now)
        self._repeat_checks(now)
        if now >= self._next_probe_s:
            if self._lateness == {False}:
                self.health = max(0, self.health - 1)
            self._lateness.clear()
            self._next_probe_s = now + self._timing.probe_interval_s * (1 + self.health)
            for record in self._targets():
                self.urgent(record.member.key, now)

    def urgent(self, key: MemberKey, now: float) -> None:
        """Probe `key` at once unless a probe is under way."""
        record = self._membership.records.get(key)
        if record is None or record.ended:
            return
        for probe in self._probes.values():
            if probe.target == key:
                return
        self._probe(record, now)

    def confirm(self, key: MemberKey, now: float) -> None:
        """Somebody suspects `key`: look at once, or, in a large group, let some others do so."""
        num_live = self._membership.num_live()
        if num_live <= NUM_CONFIRMING or self._rng.random() * num_live < NUM_CONFIRMING:
            self.urgent(key, now)

    def on_ping(self, sender: Record, message: Ping) -> None:
        self._out.send(sender.member, Ack(message.seq, self._beat(sender)))

    def on_ack(self, sender: Record, message: Ack) -> None:
        probe = self._probes.get(message.seq)
        relay = self._relays.pop(message.seq, None)
        if probe is not None and probe.target == sender.member.key:
            del self._probes[message.seq]
            self._hear_of_myself(late=probe.asked_others)
        elif relay is not None and relay.target == sender.member.key:
            requester = self._membership.records.get(relay.requester)
            if requester is not None:
                self._out.send(requester.member, IndirectAck(relay.seq, relay.target))
        elif message.seq in self._overdue:
            self._overdue.remove(message.seq)
            self._hear_of_myself(late=True)

    def _hear_of_myself(self, *, late: bool) -> None:
        """An answer that comes late tells that this node or its network is slow: it asks less then and waits longer,
        until all answers of a round come in time.
        """
        if late:
            self.health = min(MAX_HEALTH, self.health + 1)
        self._lateness.add(late)

    def on_indirect_ack(self, message: IndirectAck) -> None:
        probe = self._probes.get(message.seq)
        if probe is not None and probe.target == message.target:
            del self._probes[message.seq]

    def on_ping_request(self, sender: Record, message: PingRequest, now: float) -> None:
        target = self._membership.records.get(message.target)
        if target is None or target.ended:
            return
        self._seq += 1
        until_s = now + self._timing.probe_interval_s
        self._relays = {seq: relay for seq, relay in self._relays.items() if relay.until_s > now}
        self._relays[self._seq] = _Relay(sender.member.key, message.seq, message.target, until_s)
        self._out.send(target.member, Ping(self._seq, self._beat(target)))

    def on_lost(self, address: str, now: float) -> None:
        """The connection to `address` broke: see at once whether somebody still listens there."""
        for record in self._membership.at(address):
            self._check(record, now)
            self.urgent(record.member.key, now)

    def on_dialed(self, address: str, refused: bool, now: float) -> None:
        for record in self._membership.at(address):
            check = self._checks.get(record.member.key)
            if refused and record.member.host_owned:
                self._checks.pop(record.member.key, None)
                reason = f"its agent is not running: connection refused at {address}"
                self._membership.judge(record.member.key, Status.GONE, reason, now, proof=True)
                self._out.put(Forget(address))
            elif check is not None:
                if check.num_dials <= len(_REDIAL_S):
                    check.next_s = now + _REDIAL_S[check.num_dials - 1]
                else:
                    del self._checks[record.member.key]

    def _check(self, record: Record, now: float) -> None:
        if record.member.host_owned:
            self._checks[record.member.key] = _Check(1, now + self._timing.dial_s)
            self._out.put(Dial(record.member.address))

    def _repeat_checks(self, now: float) -> None:
        for key, check in list(self._checks.items()):
            record = self._membership.records.get(key)
            if record is None or record.ended:
                del self._checks[key]
            elif now >= check.next_s:
                check.num_dials += 1
                check.next_s = now + self._timing.dial_s
                self._out.put(Dial(record.member.address))

    def _targets(self) -> list[Record]:
        """The next live members in a shuffled round; and one silent member, or a healed partition stays unnoticed."""
        records = self._membership.records
        live = {record.member.key for record in self._membership.live()}
        self._order = [key for key in self._order if key in live]
        if len(self._order) < min(NUM_TARGETS, len(live)):
            fresh = sorted(live - set(self._order))
            self._rng.shuffle(fresh)
            self._order += fresh
        chosen, self._order = self._order[:NUM_TARGETS], self._order[NUM_TARGETS:]
        if self._membership.num_silent():
            silent = sorted(r.member.key for r in self._membership.others() if r.status is Status.DEAD)
            chosen.append(self._rng.choice(silent))
        return [records[key] for key in chosen]

    def _probe(self, record: Record, now: float) -> None:
        self._seq += 1
        self._probes[self._seq] = _Probe(record.member.key, now)
        self._out.send(record.member, Ping(self._seq, self._beat(record)))

    def _probe_deadline_s(self, probe: _Probe) -> float:
        allowed_s = self._timing.probe_interval_s if probe.asked_others else self._timing.probe_timeout_s
        return probe.sent_s + allowed_s * (1 + self.health)

    def _follow_probes(self, now: float) -> None:
        for seq, probe in list(self._probes.items()):
            record = self._membership.records.get(probe.target)
            if record is None or not record.live:
                del self._probes[seq]
            elif now < self._probe_deadline_s(probe):
                continue
            elif probe.asked_others:
                del self._probes[seq]
                self._overdue.append(seq)
                reason = f"no answer to a probe for {now - probe.sent_s:.2f} s"
                self._accuse(probe.target, Status.SUSPECT, reason, now)
            else:
                probe.asked_others = True
                self._ask_others(seq, record, now)

    def _ask_others(self, seq: int, target: Record, now: float) -> None:
        relays = [record for record in self._membership.live() if record is not target]
        num_relays = max(1, NUM_RELAYS - self.health)  # help costs four messages each
        for record in self._rng.sample(relays, min(num_relays, len(relays))):
            self._out.send(record.member, PingRequest(seq, target.member.key))
        if target.member.key not in self._checks:
            self._check(target, now)

    def _end_suspicions(self, now: float) -> None:
        num_live = self._membership.num_live()
        bounds = self._timing.suspicion_min_s, self._timing.suspicion_max_s
        for record in list(self._membership.suspects.values()):
            if record.suspicion is not None and now >= record.suspicion.deadline_s(num_live, *bounds):
                reason = f"silent for {now - record.heard_s:.2f} s"
                self._accuse(record.member.key, Status.DEAD, reason, now)

    def _accuse(self, key: MemberKey, status: Status, reason: str, now: float) -> None:
        """Silence is told to all at once only by who is not slow: where everybody is, that many messages would
        keep all of them slow.
        """
        self._membership.judge(key, status, reason, now, at_once=self.health == 0)
