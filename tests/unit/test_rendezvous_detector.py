"""Failure detection with a manual clock: probes, help from others, proof, and patience with oneself."""

from __future__ import annotations

import itertools
import random

import pytest

from rendezvous.config import Timing
from rendezvous.detector import Detector
from rendezvous.effects import Dial, Effect, Forget, Outbox, Send
from rendezvous.membership import Membership
from rendezvous.messages import Ack, Beat, Gossip, IndirectAck, Ping, PingRequest, Status, Update
from rendezvous.types import Member

TIMING = Timing(1.0, 10.0)


class Bench:
    """A detector at node a that knows the other names; the test plays the network."""

    def __init__(self, names: str, **more: object) -> None:
        self.out = Outbox()
        self.members = {name: Member(name, 1, f"127.0.0.1:{7000 + ord(name)}", **more) for name in "a" + names}  # type: ignore[arg-type]
        self.membership = Membership(self.members["a"], self.out, 0.0)
        self.detector = Detector(self.membership, TIMING, lambda _: Beat(0, 0), random.Random(1), self.out, 0.0)
        for name in names:
            self.membership.apply(Update(self.members[name], Status.ALIVE, 0, "", False, name), 0.0)
        self.out.drain()

    def tick(self, now: float) -> list[Effect]:
        self.detector.tick(now)
        return self.out.drain()

    def status(self, name: str) -> Status:
        return self.membership.records[self.members[name].key].status

    def answer(self, name: str, effects: list[Effect]) -> None:
        record = self.membership.records[self.members[name].key]
        for effect in effects:
            if isinstance(effect, Send) and effect.to == self.members[name].key and isinstance(effect.message, Ping):
                self.detector.on_ack(record, Ack(effect.message.seq, Beat(0, 0)))


def pinged(effects: list[Effect]) -> list[str]:
    return sorted(e.to.name for e in effects if isinstance(e, Send) and e.to and isinstance(e.message, Ping))


def test_every_member_is_probed_within_a_bounded_number_of_intervals() -> None:
    bench = Bench("bcdefghijklmnopqrstuvwxyz")
    seen: set[str] = set()
    for now in range(7):
        seen |= set(pinged(bench.tick(float(now))))
    assert seen >= set("bcdefghijklmnopqrstuvwxyz")


def test_answered_probe_leads_to_nothing() -> None:
    bench = Bench("b")
    bench.answer("b", bench.tick(0.0))
    assert bench.tick(0.5) == []
    assert bench.status("b") is Status.ALIVE


def test_unanswered_probe_asks_others_and_checks_the_address_then_suspects_then_gives_up() -> None:
    bench = Bench("bc")
    bench.answer("c", bench.tick(0.0))
    effects = bench.tick(0.4)
    assert [e.to.name for e in effects if isinstance(e, Send) and e.to and isinstance(e.message, PingRequest)] == ["c"]
    assert [e.address for e in effects if isinstance(e, Dial)] == [bench.members["b"].address]
    bench.answer("c", bench.tick(1.0))
    assert bench.status("b") is Status.SUSPECT
    bench.answer("c", bench.tick(1.0 + TIMING.suspicion_min_s - 0.01))
    assert bench.status("b") is Status.SUSPECT
    bench.tick(1.0 + TIMING.suspicion_max_s)
    assert bench.status("b") is Status.DEAD
    assert not bench.membership.records[bench.members["b"].key].proof


@pytest.mark.parametrize(("about", "status"), [("b", Status.ALIVE), ("c", Status.SUSPECT)])
def test_indirect_answer_saves_the_target_that_it_names(about: str, status: Status) -> None:
    bench = Bench("bc")
    effects = bench.tick(0.0)
    bench.answer("c", effects)
    (request,) = [e.message for e in bench.tick(0.4) if isinstance(e, Send) and isinstance(e.message, PingRequest)]
    bench.detector.on_indirect_ack(IndirectAck(request.seq, bench.members[about].key))
    bench.tick(1.1)
    assert bench.status("b") is status


def test_relay_passes_the_answer_on_to_who_asked() -> None:
    bench = Bench("bc")
    asker = bench.membership.records[bench.members["c"].key]
    bench.detector.on_ping_request(asker, PingRequest(77, bench.members["b"].key), 0.0)
    effects = bench.out.drain()
    assert pinged(effects) == ["b"]
    bench.answer("b", effects)
    (sent,) = [e for e in bench.out.drain() if isinstance(e, Send)]
    assert sent.to == bench.members["c"].key
    assert sent.message == IndirectAck(77, bench.members["b"].key)


def test_refused_connection_at_an_owned_address_is_proof_of_death() -> None:
    bench = Bench("b")
    bench.detector.on_lost(bench.members["b"].address, 0.0)
    assert any(isinstance(e, Dial) for e in bench.out.drain())
    bench.detector.on_dialed(bench.members["b"].address, True, 0.01)
    assert bench.status("b") is Status.GONE
    assert bench.membership.gone() == {bench.members["b"].key}
    assert any(isinstance(e, Forget) for e in bench.out.drain())


def test_refused_connection_behind_a_proxy_proves_nothing() -> None:
    bench = Bench("b", host_owned=False)
    bench.detector.on_lost(bench.members["b"].address, 0.0)
    assert not any(isinstance(e, Dial) for e in bench.out.drain())
    bench.detector.on_dialed(bench.members["b"].address, True, 0.01)
    assert bench.status("b") is Status.ALIVE


def test_check_that_came_too_early_is_repeated_a_bounded_number_of_times() -> None:
    bench = Bench("b")
    address = bench.members["b"].address
    bench.detector.on_lost(address, 0.0)
    bench.answer("b", bench.out.drain())
    now, dials = 0.0, [0.0]
    bench.detector.on_dialed(address, False, now)
    while now < 5.0:
        now += 0.01
        effects = bench.tick(now)
        bench.answer("b", effects)
        for effect in effects:
            if isinstance(effect, Dial):
                dials.append(now)
                bench.detector.on_dialed(address, False, now)
    assert len(dials) == 1 + 6
    pauses_s = [after - before for before, after in itertools.pairwise(dials)]
    assert 0.02 <= pauses_s[0] < pauses_s[1] < pauses_s[5] < 1.0
    assert bench.status("b") is Status.ALIVE


def test_stalled_detector_drops_its_probes_and_judges_later() -> None:
    bench = Bench("bc")
    bench.tick(0.0)
    bench.membership.judge(bench.members["c"].key, Status.SUSPECT, "no answer", 0.0)
    bench.out.drain()
    bench.detector.postpone(60.0, 60.0)
    assert not [e for e in bench.tick(60.0) if isinstance(e, Send) and isinstance(e.message, PingRequest)]
    assert bench.status("b") is Status.ALIVE
    assert bench.status("c") is Status.SUSPECT
    assert bench.detector.health == 1


def test_refuted_rumour_about_oneself_makes_the_detector_more_patient() -> None:
    bench = Bench("bc")
    bench.membership.apply(Update(bench.members["a"], Status.SUSPECT, 0, "", False, "b"), 0.0)
    bench.out.drain()
    bench.tick(0.0)
    assert bench.detector.health == 1
    assert not any(isinstance(e, Send) and isinstance(e.message, PingRequest) for e in bench.tick(0.4))
    assert any(isinstance(e, Send) and isinstance(e.message, PingRequest) for e in bench.tick(0.81))


def test_late_answers_make_the_detector_ask_less_and_wait_longer_until_a_round_is_answered_in_time() -> None:
    bench = Bench("bc")

    def answer_all(effects: list[Effect]) -> None:
        for name in "bc":
            bench.answer(name, effects)

    asked = bench.tick(0.0)
    bench.tick(0.4)
    answer_all(asked)
    assert bench.detector.health == 2
    answer_all(bench.tick(1.0))
    assert pinged(bench.tick(3.9)) == []
    answer_all(bench.tick(4.0))
    assert bench.detector.health == 1
    assert pinged(bench.tick(5.9)) == []
    answer_all(bench.tick(6.0))
    assert bench.detector.health == 0


def test_answer_after_the_suspicion_tells_that_this_node_is_slow() -> None:
    bench = Bench("b")
    asked = bench.tick(0.0)
    bench.tick(0.4)
    bench.tick(1.0)
    assert bench.status("b") is Status.SUSPECT
    bench.answer("b", asked)
    assert bench.detector.health == 1
    bench.answer("b", asked)  # a duplicate tells nothing
    assert bench.detector.health == 1


def test_slow_node_does_not_send_its_suspicion_to_everybody() -> None:
    for health, told in ((0, ["c", "d"]), (1, [])):
        bench = Bench("bcd")
        bench.detector.health = health
        asked = bench.tick(0.0)
        for name in "cd":
            bench.answer(name, asked)
        bench.tick(0.8)
        effects = bench.tick(2.0)
        assert bench.status("b") is Status.SUSPECT
        assert [e.to.name for e in effects if isinstance(e, Send) and e.to and isinstance(e.message, Gossip)] == told


def test_silent_member_goes_on_being_probed_so_that_a_healed_link_is_noticed() -> None:
    bench = Bench("b")
    bench.membership.judge(bench.members["b"].key, Status.DEAD, "silent", 0.0)
    bench.out.drain()
    assert pinged(bench.tick(0.0)) == ["b"]


@pytest.mark.parametrize("asked_others", [False, True])
def test_next_deadline_is_never_in_the_past_after_a_tick(asked_others: bool) -> None:
    bench = Bench("bc")
    now = 0.0
    for _ in range(200):
        effects = bench.tick(now)
        if not asked_others:
            bench.answer("b", effects)
        assert bench.detector.next_deadline_s() > now
        now = bench.detector.next_deadline_s()
