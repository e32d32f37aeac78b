"""A network and a mount namespace per node, so that nodes on one machine share no more than machines would.

In: how many nodes. Out: addresses on a bridge of their own, and the command prefix that starts a program inside a node:
with its own network, its own /dev/shm and its own scratch directory (TMPDIR). Needs root, iproute2 and util-linux. What
is made here is gone after `close`; names carry a random token, so runs beside each other do not meet.

A node can be cut off, or be made deaf to another one: what comes from there is dropped without a word, as a broken
path does, perhaps in one direction only, or for some ports only.
"""

import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

NETWORK = "10.77.0"
TCP_LISTEN = "0A"  # in the fourth column of /proc/net/tcp
LIMIT_S = 10.0
# Order of routing rules. What is for this host goes to its table after those of `deafen`, and not before everything.
HEARD, DROPPED, LOCAL = "100", "200", "300"


def why_not() -> str | None:
    """Why namespaces cannot be had here, or None."""
    if os.geteuid() != 0:
        return "network and mount namespaces need root"
    missing = [tool for tool in ("ip", "unshare", "mount") if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    probe = f"p2p-{secrets.token_hex(3)}"
    tried = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, timeout=LIMIT_S)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, timeout=LIMIT_S)
    return None if tried.returncode == 0 else f"ip netns add: {tried.stderr.strip()}"


class Namespaces:
    """Raises subprocess.CalledProcessError when the machine refuses; what was made by then is removed."""

    def __init__(self, count: int, scratch: Path) -> None:
        token = secrets.token_hex(3)
        self._hub, self._scratch = f"p2p-{token}-hub", scratch
        self._nodes = [f"p2p-{token}-{index}" for index in range(count)]
        self.addresses = [f"{NETWORK}.{index + 1}" for index in range(count)]
        scratch.mkdir(parents=True)
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        ip("netns", "add", self._hub)
        ip("-n", self._hub, "link", "add", "bridge", "type", "bridge")
        ip("-n", self._hub, "link", "set", "bridge", "up")
        for index, (name, address) in enumerate(zip(self._nodes, self.addresses, strict=True)):
            ip("netns", "add", name)
            ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"port{index}", "netns", self._hub)
            ip("-n", self._hub, "link", "set", f"port{index}", "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "rule", "add", "pref", LOCAL, "lookup", "local")
            ip("-n", name, "rule", "del", "pref", "0")

    def prefix(self, index: int) -> list[str]:
        """To be put in front of a command; its process id stays that of the command."""
        mounts = f'mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs "{self._scratch}"'
        inside = f'{mounts} && TMPDIR="{self._scratch}" exec "$@"'
        return ["ip", "netns", "exec", self._nodes[index], "unshare", "--mount", "sh", "-c", inside, "sh"]

    def listeners(self, index: int) -> list[str]:
        """Local addresses, as the kernel writes them, on which something inside the node listens."""
        tables = ip("netns", "exec", self._nodes[index], "cat", "/proc/net/tcp", "/proc/net/tcp6")
        rows = [line.split() for line in tables.splitlines()]
        return [row[1] for row in rows if row[3] == TCP_LISTEN]

    def processes(self, index: int) -> list[int]:
        """Everything that runs inside the node, whoever started it."""
        return [int(pid) for pid in ip("netns", "pids", self._nodes[index]).split()]

    def cut(self, index: int) -> None:
        """From now on no packet enters or leaves the node."""
        ip("-n", self._hub, "link", "set", f"port{index}", "down")

    def mend(self, index: int) -> None:
        """The end of `cut`."""
        ip("-n", self._hub, "link", "set", f"port{index}", "up")

    def deafen(self, index: int, to: int, but_ports: Sequence[int] = ()) -> None:
        """From now on no packet of node `to` is heard in the node, but of connections that lead to these ports."""
        source = ("from", self.addresses[to])
        for port in but_ports:
            for end in ("sport", "dport"):
                rule = ("pref", HEARD, *source, "ipproto", "tcp", end, str(port))
                ip("-n", self._nodes[index], "rule", "add", *rule, "lookup", "local")
        ip("-n", self._nodes[index], "rule", "add", "pref", DROPPED, *source, "blackhole")

    def undeafen(self, index: int, to: int) -> None:
        """The end of `deafen`."""
        source = ("from", self.addresses[to])
        for order in (HEARD, DROPPED):
            while (
                subprocess.run(
                    ["ip", "-n", self._nodes[index], "rule", "del", "pref", order, *source],
                    capture_output=True,
                    timeout=LIMIT_S,
                ).returncode
                == 0
            ):
                pass

    def close(self) -> None:
        for name in (*self._nodes, self._hub):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=LIMIT_S)


def ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=LIMIT_S)
    return done.stdout
