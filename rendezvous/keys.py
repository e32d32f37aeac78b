"""Key material: what both ends of every connection must share, derived from one job secret.

Flows in: the job's secret and run id. Flows out: two CURVE key pairs. Invariants: the same inputs give the same keys on
every node; without the secret neither can be made, so who connects with the derived client key knows the secret.
Limits: a member that knows the secret can speak for every other; the secret authenticates the job, not the node.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JobKeys:
    """Z85 texts as ZeroMQ wants them. Public halves are computed by the transport, which has the curve arithmetic."""

    server_secret: bytes
    client_secret: bytes


def derive_keys(secret: bytes, run_id: str) -> JobKeys:
    """Keys of the run: BLAKE2b keyed with the hashed secret, over the run id, one personalisation for each pair."""
    root = hashlib.blake2b(secret, digest_size=32, person=b"p2pstate root").digest()

    def pair(person: bytes) -> bytes:
        return _z85(hashlib.blake2b(run_id.encode(), key=root, digest_size=32, person=person).digest())

    return JobKeys(server_secret=pair(b"p2pstate server"), client_secret=pair(b"p2pstate client"))


_BASE85 = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_Z85 = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def _z85(data: bytes) -> bytes:
    """Z85 (ZeroMQ RFC 32) is base 85 over 4-byte big-endian words, in another alphabet."""
    return base64.b85encode(data).translate(bytes.maketrans(_BASE85, _Z85))
