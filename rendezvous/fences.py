"""Who is gone for certain by the word of somebody outside: an operator, or a command that asks a scheduler. Pure.

Flows in: an operator's word, answers of the fencing command, ticks. Flows out: questions for that command, judgements
in the membership table, what the operator is told.
Invariants: a member that answers is never fenced; a question is asked only while the members that answer are too few to
decide the next view; GONE is proof of death, like a refused connection (it breaks a tie, no more); FENCED means that
nothing the member began goes on anywhere, so that its vote is not missed.
Limits: a wrong word cannot be told from a right one. A member that was fenced and comes back stops as soon as it meets
anybody who knows of the fence, and not before.
"""

from __future__ import annotations

from rendezvous.agreement import Agreement
from rendezvous.config import Timing
from rendezvous.effects import AskFence, Forget, Outbox, Waiting
from rendezvous.events import AssumeDead, FenceAnswered
from rendezvous.membership import Membership, Record
from rendezvous.messages import Fence, FenceAnswer, Standing, Status
from rendezvous.types import MemberKey


class Fences:
    """Owned by the core."""

    def __init__(self, membership: Membership, agreement: Agreement, timing: Timing, out: Outbox) -> None:
        self._membership = membership
        self._agreement = agreement
        self._timing = timing
        self._out = out
        self._asked_s: dict[MemberKey, float] = {}

    def tick(self, now: float) -> None:
        """Ask about silent members of the newest view, again and again, while their votes are missed."""
        silent = self._missed()
        self._asked_s = {key: at_s for key, at_s in self._asked_s.items() if key in {r.member.key for r in silent}}
        for record in silent:
            if now >= self._asked_s.get(record.member.key, now):
                self._asked_s[record.member.key] = now + self._timing.failure_s
                self._out.put(AskFence(record.member))

    def _missed(self) -> list[Record]:
        """Silent members without whom nothing can be decided; none while the others suffice."""
        view = self._agreement.view
        if not self._membership.num_silent() or view is None or not self._agreement.is_voter():
            return []
        records = [record for record in self._membership.others() if record.member.key in view.keys]
        silent = [record for record in records if record.status is Status.DEAD]
        answering = {record.member.key for record in records if record.live} | {self._membership.me.key}
        return [] if not silent or self._agreement.has_quorum(answering) else silent

    def answered(self, event: FenceAnswered, now: float) -> None:
        """The fencing command said something. It counts only for a member that is still silent."""
        record = self._membership.records.get(event.member)
        if record is None or record.status is not Status.DEAD:
            return
        if event.status is None:
            self._out.put(Waiting(f"{record.member.name} is silent and not known to be gone: {event.text}"))
        else:
            self._fence(record, event.status, event.text, now)

    def assume(self, event: AssumeDead, now: float) -> None:
        """Count every known incarnation of a name as gone, whatever is known of it here."""
        for record in self._named(event.name):
            if record.status is not Status.FENCED:
                self._fence(record, Status.FENCED, event.reason, now)

    def asked(self, message: Fence, now: float) -> FenceAnswer:
        """An operator asks about a member, or (`sure`) wants it counted as gone. Refused while the member answers."""
        standing, text = self._standing(message.name, now)
        if standing is Standing.SILENT and message.sure:
            for record in self._named(message.name):
                if not record.live and record.status is not Status.FENCED:
                    self._fence(record, Status.FENCED, f"assumed dead: {message.reason}", now)
            standing, text = Standing.ASSUMED_DEAD, f"{message.name} is assumed dead: its vote is not missed any more"
        return FenceAnswer(message.name, standing, text)

    def _standing(self, name: str, now: float) -> tuple[Standing, str]:
        view = self._agreement.view
        if name == self._membership.me.name:
            return Standing.ANSWERS, f"{name} is this node itself"
        records = self._named(name)
        missed = (view.keys if view else frozenset()) | set(self._agreement.missed())
        waiting = [r for r in records if not r.live and r.member.key in missed]
        live = [r for r in records if r.live]
        if any(r.status is not Status.FENCED for r in waiting):
            return Standing.SILENT, f"{name} is not heard from: {waiting[0].reason}"
        if waiting:
            return Standing.ASSUMED_DEAD, f"{name} is assumed dead already"
        if any(r.status is Status.ALIVE for r in live):
            heard_s = now - max(r.heard_s for r in live)
            return Standing.ANSWERS, f"{name} is alive: heard from {max(0.0, heard_s):.1f} s ago"
        if live:
            return Standing.UNCLEAR, f"{name} is only suspected so far"
        members = ", ".join(member.name for member in view.members) if view else "nobody: there is none yet"
        return Standing.UNKNOWN, f"no vote of {name} is missed here; in the newest view are {members}"

    def _named(self, name: str) -> list[Record]:
        return [record for record in self._membership.others() if record.member.name == name]

    def _fence(self, record: Record, status: Status, reason: str, now: float) -> None:
        self._membership.judge(record.member.key, status, reason, now, proof=True)
        self._out.put(Forget(record.member.address))
