"""A member as a process of its own: prints one JSON line for each thing the node tells it. Run by the tests here."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rendezvous.config import Config
from rendezvous.node import Node
from rendezvous.types import Member, MemberChange, MemberKey, Verdict, View


def say(event: str, **fields: Any) -> None:
    print(json.dumps({"t": time.monotonic(), "event": event, **fields}), flush=True)


class Reporter:
    """An application that reports everything; commands come as lines on standard input."""

    def __init__(self) -> None:
        self.node: Node | None = None

    def ballot(self) -> dict[str, Any]:
        return {"pid": os.getpid()}

    def decide(
        self, previous: View | None, places: Sequence[Member], ballots: Mapping[MemberKey, dict[str, Any]]
    ) -> tuple[bool, dict[str, Any]]:
        new_round = bool(previous and any(ballot.get("worker_died") for ballot in ballots.values()))
        return new_round, {
            "pids": sorted(ballot["pid"] for ballot in ballots.values() if "pid" in ballot),
            "places": len(places),
        }

    def progress(self) -> dict[str, Any]:
        return {"step": 7}

    def on_view(self, view: View) -> None:
        names = [[m.name for m in group] for group in (view.places, view.spares, view.witnesses)]
        say("view", epoch=view.epoch, round=view.round, members=names, reason=view.reason, nonce=view.nonce)

    def on_waiting(self, reason: str) -> None:
        say("waiting", reason=reason)

    def on_member(self, change: MemberChange) -> None:
        say("member", kind=change.kind, name=change.member.name, reason=change.reason, proof=change.proof)

    def on_message(self, sender: MemberKey, kind: str, body: Any) -> None:
        say("message", sender=sender.name, kind=kind, body=body)

    def on_verdict(self, verdict: Verdict) -> None:
        say("verdict", code=verdict.code, text=verdict.text)
        assert self.node is not None
        self.node.call_later(0.3, self.node.stop)

    def on_evicted(self, reason: str) -> None:
        say("evicted", reason=reason)

    def on_command(self, command: list[Any]) -> None:
        node = self.node
        assert node is not None
        match command:
            case ["propose", reason]:
                node.propose(reason)
            case ["broadcast", kind, body]:
                node.broadcast(kind, body)
            case ["declare", code, text]:
                node.declare(Verdict(code, text, node.key))
            case ["leave", reason]:
                node.leave(reason)
                node.call_later(0.2, node.stop)
            case ["assume_dead", name]:
                node.assume_dead(name, "the test says so")
            case ["members"]:
                members = {key.name: [r.status.name, dict(r.progress)] for key, r in node.members().items()}
                say("members", members=members)
            case ["store", op, args, deadline_s]:
                epoch = node.view.epoch if node.view else 1
                plain = [arg.encode() if index and isinstance(arg, str) else arg for index, arg in enumerate(args)]
                node.store_request(
                    epoch,
                    op,
                    plain,
                    deadline_s,
                    lambda reply: say(
                        "store",
                        op=op,
                        ok=reply.ok,
                        value=reply.value.decode() if isinstance(reply.value, bytes) else reply.value,
                        error=reply.error,
                        ended=reply.ended,
                        timed_out=reply.timed_out,
                    ),
                )
            case _:
                raise AssertionError(f"unknown command {command}")


def resolve_from(path: str) -> None:
    """Names mean what this JSON file says when they are asked for: {name: [address, ...]}."""
    real = socket.getaddrinfo

    def getaddrinfo(host: str, port: int, **more: Any) -> list[Any]:
        table = json.loads(Path(path).read_text())
        if not host.isidentifier():
            return real(host, port, **more)
        if host not in table:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [entry for address in table[host] for entry in real(address, port, **more)]

    socket.getaddrinfo = getaddrinfo  # type: ignore[assignment]


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    arguments = json.loads(sys.argv[1])
    arguments["contacts"] = tuple(arguments.get("contacts", ()))
    if "key" in arguments:
        arguments["key"] = bytes.fromhex(arguments["key"])
    if "names" in arguments:
        resolve_from(arguments.pop("names"))
    reporter = Reporter()
    node = Node(Config.from_env({}, **arguments), reporter)
    reporter.node = node
    say("ready", address=node.member.address, incarnation=node.key.incarnation)
    buffer = bytearray()

    def read_commands() -> None:
        chunk = os.read(0, 65536)
        if not chunk:
            node.stop()  # the test is gone
        buffer.extend(chunk)
        while b"\n" in buffer:
            line, _, rest = bytes(buffer).partition(b"\n")
            buffer[:] = rest
            reporter.on_command(json.loads(line))

    node.add_reader(0, read_commands)
    try:
        node.run()
    finally:
        node.close()
    say("closed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
