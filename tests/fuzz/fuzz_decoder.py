"""Coverage-guided fuzzing of what comes from the network: bytes are a message or a WireError, and nothing else happens.

In: libFuzzer's arguments (a corpus folder, -max_total_time=S, -runs=N). Out: exit status 0, or the input that failed.
What decodes must survive encoding, and be taken by a protocol core without an error. Needs atheris.
"""

import random
import sys

import atheris

with atheris.instrument_imports(include=["rendezvous"]):
    from rendezvous import events
    from rendezvous.config import Config
    from rendezvous.core import Core
    from rendezvous.messages import Decided
    from rendezvous.types import Member, PassiveApplication, View
    from rendezvous.wire import Envelope, WireError, decode, encode

ME, PEER = Member("node-a", 12, "10.0.0.1:4711"), Member("b", 3, "10.0.0.2:4711")


def check(data: bytes) -> None:
    try:
        envelope = decode(data)
    except WireError:
        return
    again = decode(encode(envelope))
    if repr(again) != repr(envelope):  # NaN is not equal to itself
        raise AssertionError(f"{envelope} came back as {again}")
    core = Core(ME, Config("run", ME.name, ME.address), PassiveApplication(), random.Random(1), 0.0)
    view = View("nonce", 6, 3, (ME, PEER), (), (), "before")
    core.step(events.Received(Envelope("run", "", PEER.key, PEER.address, None, Decided(view))), 0.0)
    core.step(events.Received(envelope), 0.1)
    core.step(events.Tick(), 0.2)


if __name__ == "__main__":
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()
