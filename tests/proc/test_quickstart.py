"""docs/quickstart.md as it stands: its script on two nodes, without and with a killed rank, ends with the same loss."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 120.0
KILL_AT_STEP = 60


def last_loss(folder: Path, script: Path, environ: dict[str, str], *, kill: bool) -> str:
    """What rank 0 prints for the last step."""
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with Cluster(
        folder, [str(script)], num_training=2, num_spares=0, num_workers=1, environ={**environ, **paths}
    ) as run:
        deadline = time.monotonic() + WITHIN_S
        pids: dict[int, int] = {}
        killed = False
        while run.running():
            assert time.monotonic() < deadline, run.log_tails()
            for event in run.events.new():
                if event["event"] == "worker_started":
                    pids[event["rank"]] = event["pid"]
                if kill and not killed and event["event"] == "step" and event["step"] >= KILL_AT_STEP:
                    run.kill_process(pids[1])
                    killed = True
            time.sleep(0.01)
        assert killed == kill, "the run was over before a rank could be killed"
        assert set(run.exit_codes().values()) == {0}, run.log_tails()
        output = "".join(path.read_text() for path in folder.glob("logs/*/*.log"))
    losses = set(re.findall(r"step 250 (loss .*)", output))
    assert len(losses) == 1, output
    return losses.pop()


def test_quickstart_script_ends_with_the_same_loss_when_a_rank_is_killed(
    tmp_path: Path, fork_server: dict[str, str]
) -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text()
    found = re.search(r"<!-- file: (\S+) -->\n```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert found is not None
    script = tmp_path / found.group(1)
    script.write_text(found.group(2))
    undisturbed = last_loss(tmp_path / "first", script, fork_server, kill=False)
    assert last_loss(tmp_path / "second", script, fork_server, kill=True) == undisturbed
