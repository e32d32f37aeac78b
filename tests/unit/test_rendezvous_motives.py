"""Why and when a core proposes: requests, deaths, newcomers, the first view; and whose turn it is."""

from __future__ import annotations

from typing import Any

import pytest
from core_bench import Bench, member, sent, view_of

from rendezvous import events
from rendezvous.effects import Waiting
from rendezvous.messages import Decided, Gossip, Prepare, Status, Update, Wanted
from rendezvous.types import Member, Role


def test_request_of_a_member_leads_to_a_proposal_of_the_first_in_line() -> None:
    bench = Bench()
    bench.know(member("b"))
    bench.hear(member("b"), Decided(view_of("ab")))
    effects = bench.hear(member("b"), Wanted(1, "a worker died"), nonce="nonce")
    assert len(sent(effects, Prepare)) == 1


def test_request_for_an_epoch_that_is_decided_is_answered_with_it() -> None:
    bench = Bench()
    bench.know(member("b"))
    bench.hear(member("b"), Decided(view_of("ab", 3)))
    effects = bench.hear(member("b"), Wanted(2, "a worker died"), nonce="nonce")
    assert sent(effects, Decided) == [(member("b").address, Decided(view_of("ab", 3)))]
    assert sent(effects, Prepare) == []


def test_second_in_line_waits_its_stagger_before_it_proposes() -> None:
    bench = Bench()
    bench.know(member("b"))
    bench.hear(member("b"), Decided(view_of("ba")))
    stagger_s = bench.core.config.timing.stagger_s
    effects = bench.step(events.Propose("a worker died"))
    assert sent(effects, Prepare) == []
    assert sent(effects, Wanted) == [(member("b").address, Wanted(1, "a worker died"))]
    assert sent(bench.step(events.Tick(), stagger_s - 0.01), Prepare) == []
    assert len(sent(bench.step(events.Tick(), stagger_s), Prepare)) == 1


def test_request_is_void_once_an_epoch_is_decided() -> None:
    bench = Bench()
    bench.know(member("b"))
    bench.hear(member("b"), Decided(view_of("ba")))
    bench.step(events.Propose("a worker died"))
    bench.hear(member("b"), Decided(view_of("ba", 2)), nonce="nonce")
    assert bench.core.motives.reasons() == []
    effects = [e for t in range(20) for e in bench.step(events.Tick(), t / 4)]
    assert sent(effects, Wanted) == []


def test_second_request_is_told_at_once_and_repeated_with_the_first() -> None:
    bench = Bench()
    bench.know(member("b"))
    bench.hear(member("b"), Decided(view_of("ba")))
    bench.step(events.Propose("a worker died"), 0.0)
    both = [Wanted(1, "a worker died"), Wanted(1, "a worker hangs")]
    assert [wanted for _, wanted in sent(bench.step(events.Propose("a worker hangs"), 0.01), Wanted)] == both
    repeated_s = 0.01 + bench.core.config.timing.resend_s
    assert sent(bench.step(events.Tick(), repeated_s - 0.01), Wanted) == []
    assert [wanted for _, wanted in sent(bench.step(events.Tick(), repeated_s), Wanted)] == both


def test_reasons_are_as_many_as_a_view_can_tell() -> None:
    bench = Bench()
    bench.know(member("b"))
    bench.hear(member("b"), Decided(view_of("ba")))
    for number in range(40):
        bench.hear(member("b"), Wanted(1, f"worker {number} died"), nonce="nonce")
    assert bench.core.motives.reasons() == [f"worker {number} died" for number in range(16)]


@pytest.mark.parametrize(
    ("status", "silent", "answered"),
    [
        (Status.SUSPECT, [], []),
        (Status.DEAD, ["b is dead: why"], []),
        (Status.LEFT, ["b left: why"], ["b left: why"]),
        (Status.GONE, ["b is dead: why"], ["b is dead: why"]),
    ],
)
def test_reason_of_a_death_is_void_for_who_is_silent_and_then_answers_only(
    status: Status, silent: list[str], answered: list[str]
) -> None:
    bench = Bench()
    bench.know(member("b"))
    bench.hear(member("b"), Decided(view_of("ab")))
    bench.core.membership.judge(member("b").key, status, "why", 0.0)
    assert bench.core.motives.reasons() == silent
    assert bench.core.motives.reasons({member("b").key}) == answered


def test_reason_names_the_newcomers_that_are_here_for_a_moment_only() -> None:
    bench = Bench()
    bench.know(member("b"))
    bench.hear(member("b"), Decided(view_of("ba")))
    interval_s = bench.core.config.timing.probe_interval_s
    bench.know(member("c"))
    bench.now = interval_s / 2
    bench.know(member("d"))
    bench.step(events.Tick(), interval_s)
    assert bench.core.motives.reasons() == ["c joined"]
    bench.step(events.Tick(), 1.5 * interval_s)
    assert bench.core.motives.reasons() == ["c joined", "d joined"]


def test_new_member_is_taken_in_after_a_moment_so_that_several_come_together() -> None:
    bench = Bench()
    bench.know(member("b"))
    bench.hear(member("b"), Decided(view_of("ab")))
    bench.know(member("c"))
    assert sent(bench.step(events.Tick(), 0.1), Prepare) == []
    interval_s = bench.core.config.timing.probe_interval_s
    assert sent(bench.step(events.Tick(), interval_s), Prepare)


def start(bench: Bench, until_s: float) -> tuple[list[str], float | None]:
    """Tick until the first proposal; -> (what was waited for, when it came)."""
    reasons: list[str] = []
    for tick in range(int(until_s * 10)):
        effects = bench.step(events.Tick(), tick / 10)
        reasons += [e.reason for e in effects if isinstance(e, Waiting)]
        if sent(effects, Prepare):
            return reasons, tick / 10
    return reasons, None


@pytest.mark.parametrize(
    ("others", "config", "comes_s", "waits_for"),
    [
        ([], {}, None, "1 of 2 training nodes joined: waiting for the others"),
        ([], {"num_nodes_max": 3}, None, "1 of 2 to 3 training nodes joined: waiting for the others"),
        ([member("b")], {}, 0.0, None),
        ([member("b")], {"num_spares_expected": 1}, 3.0, "2 of 3 nodes joined: last call of 3 s"),
        ([member("b"), member("c")], {"num_spares_expected": 1}, 0.0, None),
        ([member("b")], {"num_nodes_max": 3}, 3.0, "2 of 3 nodes"),
        ([member("b")], {"num_witnesses_expected": 1}, 3.0, "0 of 1 witnesses"),
        ([member("b"), member("w", role=Role.WITNESS, num_workers=0)], {"num_witnesses_expected": 1}, 0.0, None),
    ],
)
def test_first_view_waits_for_everybody_expected_but_not_beyond_the_last_call(
    others: list[Member], config: dict[str, Any], comes_s: float | None, waits_for: str | None
) -> None:
    bench = Bench(first_view_last_call_s=3.0, failure_s=60.0, **config)
    for other in others:
        bench.core.membership.apply(Update(other, Status.ALIVE, 0, "", False, other.name), 0.0)
    reasons, when_s = start(bench, 5.0)
    assert when_s == comes_s
    assert waits_for is None or any(waits_for in reason for reason in reasons)


def test_stranger_turned_away_is_a_hint_while_nodes_are_missing_once() -> None:
    bench = Bench()
    bench.step(events.Tick(), 0.0)
    (waiting,) = bench.step(events.Unauthorised(), 0.1)
    assert isinstance(waiting, Waiting)
    assert waiting.reason.startswith("1 of 2 training nodes joined: waiting for the others; somebody was turned away")
    assert bench.step(events.Unauthorised(), 0.2) == []


def test_rejoining_agent_founds_no_run() -> None:
    bench = Bench(rejoin=True, failure_s=60.0)
    bench.core.membership.apply(Update(member("b"), Status.ALIVE, 0, "", False, "b"), 0.0)
    assert start(bench, 5.0)[1] is None


def test_newcomer_with_the_name_of_a_live_member_is_no_reason_until_that_one_is_dead() -> None:
    """Two members took in one node each, both of one name: whoever hears of both has both in its table."""
    bench = Bench()
    bench.know(member("b"), member("c"))
    bench.hear(member("b"), Decided(view_of("abc")))
    other = Update(member("c", 2, 9999), Status.ALIVE, 0, "", False, "b")
    bench.hear(member("b"), Gossip((other,)), nonce="nonce")
    assert sent(bench.step(events.Tick(), 1.0), Prepare) == []
    assert bench.status(other.member) is Status.ALIVE
    bench.core.membership.judge(member("c").key, Status.GONE, "killed", 1.0, proof=True)
    bench.step(events.Tick(), 1.1)
    assert bench.core.motives.reasons() == ["c is dead: killed", "c joined"]
    assert bench.core.agreement.proposal is not None
