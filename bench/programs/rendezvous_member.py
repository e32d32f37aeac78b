"""One rendezvous agent for the benchmark, ours or torchrun's c10d: tells as JSON lines what it learns, and when.

In: one JSON argument. Out: lines {"t": monotonic seconds, "event": ...}. Started by rendezvous_agents.py.
"""

import json
import os
import sys
import time
from typing import Any


def say(event: str, **fields: Any) -> None:
    print(json.dumps({"t": time.monotonic(), "event": event, **fields}), flush=True)


def run_ours(arguments: dict[str, Any]) -> None:
    from rendezvous.config import Config
    from rendezvous.node import Node
    from rendezvous.types import MemberChange, PassiveApplication, View

    class Application(PassiveApplication):
        def on_view(self, view: View) -> None:
            say("view", members=sorted(member.name for member in view.members))

        def on_member(self, change: MemberChange) -> None:
            say("member", kind=change.kind, name=change.member.name, reason=change.reason)

        def on_evicted(self, reason: str) -> None:
            say("evicted", reason=reason)

    arguments["contacts"] = tuple(arguments["contacts"])
    key = bytes.fromhex(arguments.pop("key"))
    node = Node(Config.from_env({}, key=key, **arguments), Application())
    node.add_reader(0, node.stop)  # the benchmark closes this end when it is done
    try:
        node.run()
    finally:
        node.close()


def run_c10d(arguments: dict[str, Any]) -> None:
    """As torchrun's agent does: rendezvous, and again when told that somebody is dead."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    parameters = RendezvousParameters(backend="c10d", **arguments["parameters"])
    backend, store = create_backend(parameters)
    handler = create_handler(store, backend, parameters)
    while True:
        info = handler.next_rendezvous()
        say("view", size=info.world_size, rank=info.rank)
        if not sys.stdin.readline():
            break


def main() -> None:
    arguments = json.loads(sys.argv[1])
    kind = arguments.pop("kind")
    say("started")
    (run_ours if kind == "ours" else run_c10d)(arguments)
    os._exit(0)


if __name__ == "__main__":
    main()
