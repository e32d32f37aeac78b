"""Where copies really lie: nodes with labels, and more copies than one."""

from __future__ import annotations

import time
from pathlib import Path

from cluster import Cluster

DEADLINE_S = 120.0  # only a hang takes this long


def end(cluster: Cluster) -> None:
    """Wait for a clean end."""
    deadline = time.monotonic() + DEADLINE_S
    while cluster.running():
        assert time.monotonic() < deadline, cluster.log_tails()
        time.sleep(0.02)
    assert set(cluster.exit_codes().values()) == {0}, cluster.log_tails()
    assert cluster.leftovers() == []


def test_nodes_with_rack_labels_have_their_partners_in_other_racks(tmp_path: Path, fork_server: dict[str, str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, p2pstate\n"
        "from p2pstate.worker.context import current\n"
        "p2pstate.init_process_group()\n"
        "nodes = [worker.node for worker in current().info.workers]\n"
        "(buddy,), me = current().buddies, int(os.environ['RANK'])\n"
        f"open(os.path.join({str(tmp_path)!r}, nodes[me]), 'w').write(nodes[buddy])\n"
    )
    racks = "abab"  # without labels each node's partner is in its own rack
    with Cluster(
        tmp_path / "run", [str(script)], num_training=4, num_spares=0, num_workers=1, environ=fork_server, racks=racks
    ) as cluster:
        end(cluster)
    partner = {f"node{index}": (tmp_path / f"node{index}").read_text() for index in range(4)}
    assert all(racks[int(node[-1])] != racks[int(other[-1])] for node, other in partner.items()), partner


def test_node_that_is_alone_says_what_its_copies_do_not_protect_from(
    tmp_path: Path, fork_server: dict[str, str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import p2pstate\np2pstate.init_process_group()\n")
    with Cluster(
        tmp_path / "run", [str(script)], num_training=1, num_spares=0, num_workers=2, environ=fork_server
    ) as cluster:
        end(cluster)
        told = [event["text"] for event in cluster.events.new() if event["event"] == "weakness"]
    assert len(told) == 1
    assert told[0].startswith("node0 is the only node, so every copy is in its memory")
