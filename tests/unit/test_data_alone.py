"""``p2pstate.data`` is usable without the rest of p2pstate."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import p2pstate.data
others = [name for name in sys.modules if name.startswith(("p2pstate.", "rendezvous", "zmq", "msgpack", "psutil"))]
print([name for name in others if not name.startswith("p2pstate.data")])
"""


def test_data_package_loads_nothing_else_of_p2pstate() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.strip() == "[]"
