"""The fencing command: a program of the user's that tells whether a silent node is gone.

Flows in: members that do not answer. Flows out: for each question one answer, on a thread of this file's own.

The program is started without a shell as `COMMAND... NAME ADDRESS`, with the node's name, address and start (the
incarnation: microseconds since 1970) in P2PSTATE_FENCE_NODE, _ADDRESS and _STARTED_US and the run in P2PSTATE_RUN_ID.
It says what it knows by its exit status:
    0      the node is gone: its agent does not run and never will again. As good as a refused connection.
    3      gone, and nothing it took part in goes on elsewhere: its vote is not missed (`p2prun assume-dead`).
    1      it is not gone.
    other  it cannot be told now; the question is asked again.
Its last line of output is reported.
Invariants: the node's loop never waits for it; one that takes longer than TIMEOUT_S, or than the node lives, is ended
with all processes of its session; about one member there is one question at a time.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from rendezvous.config import split_command
from rendezvous.messages import Status
from rendezvous.types import Member, MemberKey

TIMEOUT_S = 30.0

_MAX_OUTPUT_BYTES = 4096


def read_answer(code: int | None, output: str, timeout_s: float) -> tuple[Status | None, str]:
    """What an exit status (None: it did not end in time) and the output mean."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = f" ({lines[-1][:200]})" if lines else ""
    match code:
        case 0:
            return Status.GONE, f"the fencing command says that it is gone{said}"
        case 3:
            return Status.FENCED, f"the fencing command says that it is gone with all it began{said}"
        case 1:
            return None, f"the fencing command says that it is not gone{said}"
        case None:
            return None, f"the fencing command did not end within {timeout_s:g} s{said}"
        case _:
            return None, f"the fencing command failed with status {code}{said}"


class FenceCommand:
    """Asks on threads, one for each question. `report` is called on them: member, status or None, sentence.

    Raises ValueError if there is no such command.
    """

    def __init__(
        self,
        command: str,
        run_id: str,
        report: Callable[[MemberKey, Status | None, str], None],
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._words = split_command(command)
        if shutil.which(self._words[0]) is None:
            raise ValueError(f"fence {command!r}: there is no command {self._words[0]!r} here")
        self._run_id = run_id
        self._report = report
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._asking: dict[MemberKey, threading.Thread] = {}
        self._running: set[subprocess.Popen[bytes]] = set()
        self._closed = False

    def ask(self, member: Member) -> None:
        """Start a question about `member`, unless one is under way."""
        with self._lock:
            if self._closed or member.key in self._asking:
                return
            thread = threading.Thread(target=self._ask, args=(member,), name="rendezvous-fence", daemon=True)
            self._asking[member.key] = thread
        thread.start()

    def close(self) -> None:
        """End what runs; nothing is reported afterwards. Idempotent."""
        with self._lock:
            self._closed = True
            for process in self._running:
                _kill_all(process)
            threads = list(self._asking.values())
        for thread in threads:
            thread.join(1.0)

    def _ask(self, member: Member) -> None:
        environ = {
            **{name: value for name, value in os.environ.items() if name != "P2PSTATE_KEY"},
            "P2PSTATE_RUN_ID": self._run_id,
            "P2PSTATE_FENCE_NODE": member.name,
            "P2PSTATE_FENCE_ADDRESS": member.address,
            "P2PSTATE_FENCE_STARTED_US": str(member.incarnation),
        }
        try:
            if member.name.startswith("-"):
                raise OSError(f"{member.name!r} would be taken for an option")
            code, output = self._run([*self._words, member.name, member.address], environ)
            status, text = read_answer(code, output, self._timeout_s)
        except OSError as error:
            status, text = None, f"the fencing command cannot be run: {error}"
        with self._lock:
            del self._asking[member.key]
            closed = self._closed
        if not closed:
            self._report(member.key, status, text)

    def _run(self, words: Sequence[str], environ: Mapping[str, str]) -> tuple[int | None, str]:
        """-> (exit status, None if it did not end in time; the end of its output)."""
        with self._lock:
            if self._closed:
                return None, ""
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environ,
                start_new_session=True,
            )
            self._running.add(process)
        try:
            return _finish(process, time.monotonic() + self._timeout_s)
        finally:
            with self._lock:
                self._running.discard(process)


def _finish(process: subprocess.Popen[bytes], until_s: float) -> tuple[int | None, str]:
    assert process.stdout is not None
    output = b""
    with process.stdout as stream:
        while (left_s := until_s - time.monotonic()) > 0:
            if not select.select([stream], [], [], left_s)[0]:
                continue
            chunk = os.read(stream.fileno(), _MAX_OUTPUT_BYTES)
            if not chunk:
                break
            output = (output + chunk)[-_MAX_OUTPUT_BYTES:]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until_s - time.monotonic()))
        code = process.returncode
        _kill_all(process)
        process.wait()
    return code, output.decode(errors="replace")


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    """The process and whatever it started in its session. A process that was waited for is not touched."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
