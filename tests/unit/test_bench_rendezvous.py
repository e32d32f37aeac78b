"""The rendezvous benchmark ends with one JSON line that has the agreed keys, and its simulation scales as it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "bench" / "rendezvous.py"


def test_last_line_has_the_agreed_keys_and_load_does_not_grow_with_the_group() -> None:
    command = [sys.executable, str(BENCH), "--quick", "--only", "sim", "--members", "12", "48"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result) >= {"init", "store_ops", "view_s", "replace_s", "false_suspicions", "sim"}
    assert set(result["replace_s"]) == {"killed", "silent", "local", "c10d"}
    small, large = result["sim"]["12"], result["sim"]["48"]
    assert set(small) >= {"messages_per_member_s", "bytes_per_member_s", "next_view_s"}
    assert large["messages_per_member_s"] < 1.1 * small["messages_per_member_s"]
    assert large["bytes_per_member_s"] < 1.2 * small["bytes_per_member_s"]
    assert 0 < large["next_view_s"] < 1.0
