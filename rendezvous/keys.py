"""Key material: the job's secret, and what both ends of every connection derive from it.

Flows in: a key file, or a secret in text; a run id. Flows out: the secret, two CURVE key pairs. Invariants: the same
inputs give the same keys on every node; without the secret neither can be made, so who connects with the derived
client key knows the secret; no text made here contains a secret.
Limits: a member that knows the secret can speak for every other; the secret authenticates the job, not the node.
"""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

SECRET_BYTES = 32
HOW_TO_MAKE_ONE = "make one with `p2pstate keygen FILE` (or `openssl rand -hex 32`)"
_MAX_FILE_BYTES = 4096


def make_key_file(path: str | Path) -> None:
    """A new secret in a new file that only its owner can read. OSError if it cannot be written or already exists."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        os.fchmod(fd, 0o600)  # whatever the umask, and on file systems that ignore the mode of open
        file.write(secrets.token_hex(SECRET_BYTES) + "\n")


def read_key_file(path: str | Path) -> bytes:
    """The secret in `path`, whose ~ is a home. OSError if it cannot be read; ValueError if everybody can, or it holds
    none."""
    path = os.path.expanduser(path)
    if not os.path.exists(path):
        raise FileNotFoundError(f"there is no key file {path}; {HOW_TO_MAKE_ONE}")
    if os.path.isdir(path):
        raise IsADirectoryError(f"the key file {path} is a directory: name the file in it")
    with open(path, encoding="ascii", errors="replace") as file:
        mode = os.fstat(file.fileno()).st_mode
        if stat.S_ISREG(mode) and mode & 0o007:
            raise ValueError(
                f"the key file {path} is open to every user of this host (mode {stat.S_IMODE(mode):o}): whoever can "
                f"read it can join or end the run. Close it with `chmod 600 {path}` (in Kubernetes: defaultMode: 0400)"
            )
        return key_from_hex(file.read(_MAX_FILE_BYTES), f"the key file {path}")


def key_from_hex(text: str, what: str) -> bytes:
    """ValueError, naming `what` and not the text, unless the text is hexadecimal and long enough."""
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        raise ValueError(f"{what} must be hexadecimal; {HOW_TO_MAKE_ONE}") from None
    check_key(key, what)
    return key


def check_key(key: bytes, what: str) -> None:
    """ValueError, naming `what`, for a secret that can be guessed by trying."""
    if len(key) < 16:
        raise ValueError(f"{what} must have at least 16 bytes; {HOW_TO_MAKE_ONE}")


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
