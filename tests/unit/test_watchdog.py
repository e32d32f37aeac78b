"""What nodes tell each other about late workers, over a node that only notes what is sent."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from typing import Any, cast

import psutil
import pytest

from p2pstate.agent.hang import FACTOR, FIRST_STEPS_FACTOR, LONG_S, Evidence
from p2pstate.agent.held import Phase, RankProcess, RankProcesses
from p2pstate.agent.watchdog import Watchdog
from p2pstate.trace import Doing, Trace, map_page, new_page
from rendezvous.types import MemberKey

ROUND = 3
OTHER, MINE = MemberKey("other", 1), MemberKey("mine", 1)


class Noting:
    def __init__(self) -> None:
        self.sent: list[tuple[MemberKey, str, Any]] = []

    def send(self, key: MemberKey, kind: str, body: Any) -> None:
        self.sent.append((key, kind, body))


@pytest.fixture
def worker() -> Iterator[RankProcess]:
    """A successor in its first step: it sleeps, and nobody has seen a step of it or of who had its rank before."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"ready\n")
        process.stdout.read(6)  # from here on it only sleeps: who starts is busy
        until = time.monotonic() + 30.0
        while psutil.Process(process.pid).status() != psutil.STATUS_SLEEPING:
            assert time.monotonic() < until
        page = map_page(new_page())
        Trace(page).do(Doing.STEPPING)
        yield RankProcess(process.pid, channel=cast(Any, None), phase=Phase.LOOP, rank=1, page=page)
        process.kill()


def test_worker_whose_steps_nobody_has_seen_is_allowed_what_they_take_elsewhere(worker: RankProcess) -> None:
    class OneWorker:
        def assigned(self) -> list[RankProcess]:
            return [worker]

    node = Noting()
    processes = cast(RankProcesses[RankProcess], OneWorker())
    watchdog = Watchdog(cast(Any, node), processes, cast(Any, None), floor_s=3.0, on_stuck=lambda _: None)
    watchdog.begin(ROUND, [OTHER, MINE], 1, 2)

    def allowed_when_asked(turn_s: float) -> float:
        until = time.monotonic() + 30.0
        while time.monotonic() < until:  # some time has to go by
            watchdog.receive(OTHER, "hang_ask", [ROUND, 1, turn_s])
            (evidence,) = (Evidence.unpack(raw) for raw in node.sent[-1][2][3])
            if evidence.lateness:
                return evidence.quiet_s / evidence.lateness
        raise AssertionError("it is never late")

    assert allowed_when_asked(0.0) == pytest.approx(LONG_S)
    assert allowed_when_asked(0.5) == pytest.approx(0.5 * FACTOR * FIRST_STEPS_FACTOR)
    assert allowed_when_asked(0.0) == pytest.approx(0.5 * FACTOR * FIRST_STEPS_FACTOR), "it is not remembered"
