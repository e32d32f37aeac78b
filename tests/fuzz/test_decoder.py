"""The coverage-guided fuzzer on the decoder for a minute, from examples of messages (pip install p2pstate[fuzz])."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rendezvous.messages import (
    Accept,
    AcceptDelta,
    Accepted,
    AppMessage,
    Ballot,
    Beat,
    Decided,
    Fence,
    Gossip,
    Join,
    Message,
    Ping,
    Promise,
    Status,
    StoreCall,
    StoreResult,
    Sync,
    TableDigest,
    Update,
)
from rendezvous.types import Member, Verdict, View
from rendezvous.view_delta import ViewDelta
from rendezvous.wire import Envelope, encode

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed"),
]


def seeds() -> list[Message]:
    a, b = Member("node-a", 12, "10.0.0.1:4711"), Member("b", 3, "10.0.0.2:4711")
    view, ballot = View("nonce", 7, 7, (b,), (a,), (), "b joined", {"step": 3}), Ballot(5, b.key)
    update, verdict = Update(b, Status.SUSPECT, 3, "no answer", False, "node-a"), Verdict(75, "retry", b.key)
    return [
        Join(b),
        Sync((update,), view, verdict, True),
        Ping(1, Beat(7, 2, (update,), verdict, {"step": 9})),
        Gossip((update, update)),
        Promise(7, ballot, True, Accepted(ballot, view), {"x": [1, None]}),
        Accept(7, ballot, view),
        AcceptDelta(7, ballot, ViewDelta(7, 7, (((0, 1), a), (), ()), "b died")),
        Decided(view),
        AppMessage("hello", {"any": [1, 2.5, b"x"]}),
        StoreCall(4, 3, "set", ["key", b"value"], 1.5),
        StoreResult(4, False, None, "late", False, True),
        Fence("b", "off", True),
        TableDigest(5),
    ]


def test_no_bytes_do_anything_but_a_message_or_a_wire_error(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    sender = Member("b", 3, "10.0.0.2:4711")
    for index, message in enumerate(seeds()):
        frame = encode(Envelope("run", "nonce", sender.key, sender.address, None, message))
        (corpus / f"{index}").write_bytes(frame)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("fuzz_decoder.py")), str(corpus), f"-max_total_time={SECONDS}"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS + 120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "DONE" in done.stderr
