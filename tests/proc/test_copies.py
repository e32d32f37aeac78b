"""Where copies really lie: nodes with labels, and more copies than one."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from cluster import Cluster
from p2pstate.placement import partners

PARALLEL = str(Path(__file__).with_name("scripts") / "parallel.py")
NUM_STEPS = 10
DEADLINE_S = 120.0  # only a hang takes this long


def end(cluster: Cluster, *, kills: bool = False) -> None:
    """Wait for a clean end."""
    cluster.wait_end(DEADLINE_S, kills=kills)
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


def train(folder: Path, kill: str, environ: dict[str, str], spares: int, *settings: str) -> list[dict[str, object]]:
    """FSDP2 on four nodes of one worker; returns the events. The final states are in the folder."""
    folder.mkdir()
    script = [PARALLEL, "fsdp_uneven", str(folder), str(NUM_STEPS), kill, *settings]
    with Cluster(folder / "run", script, num_training=4, num_spares=spares, num_workers=1, environ=environ) as cluster:
        end(cluster, kills=True)
        return cluster.events.new()


def assert_same_end(folder: Path, undisturbed: Path) -> None:
    for rank in range(4):
        found, expected = (torch.load(run / f"final-{rank}.pt") for run in (folder, undisturbed))
        assert len(found["state"]) == len(expected["state"])
        assert all(map(torch.equal, found["state"], expected["state"])), f"rank {rank} differs"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, fork_server: dict[str, str]) -> Path:
    folder = tmp_path_factory.mktemp("copies") / "undisturbed"
    train(folder, "-", fork_server, 0)
    return folder


def test_two_nodes_that_hold_each_others_shard_die_at_once_and_two_copies_outlive_it(
    undisturbed: Path, tmp_path: Path, fork_server: dict[str, str]
) -> None:
    pairing = partners([f"node{rank}" for rank in range(4)], copies=2)
    assert 2 in pairing[1]
    assert partners([f"node{rank}" for rank in range(4)])[1] == (3,), "with one copy, another rank holds it"
    events = train(tmp_path / "killed", "6:1,2:node", fork_server, 2, "copies=2")
    assert len(list((tmp_path / "killed").glob("killed-*"))) == 2
    assert_same_end(tmp_path / "killed", undisturbed)
    places = [event for event in events if event["event"] == "view"][-1]["places"]
    described = torch.load(tmp_path / "killed" / "final-1.pt")["described"]
    assert f"rank 1 on {places[1]}" in described
    assert f"copies of shard 1: {places[1]}, {places[2]}, {places[3]}" in described
    (step,) = re.findall(rf"protected: step (\d+); committed: step {NUM_STEPS}; a version after", described)
    assert f"or the run waits for one; step {step} comes from the memory of" in described
    sources = {event["rank"]: event["source"] for event in events if event["event"] == "recovery"}
    assert sources == {0: "survivor", 1: "buddy", 2: "buddy", 3: "survivor"}
    assert [event for event in events if event["event"] == "weakness"] == []


@pytest.mark.parametrize(
    ("kill", "settings", "spares"),
    [("6:1", ("lean=true",), 0), ("6:1:node", ("lean=true", "copies=2"), 1)],
    ids=["worker", "node"],
)
def test_without_copies_on_their_own_nodes_all_roll_back_over_the_network(
    kill: str, settings: tuple[str, ...], spares: int, undisturbed: Path, tmp_path: Path, fork_server: dict[str, str]
) -> None:
    events = train(tmp_path / "killed", kill, fork_server, spares, *settings)
    assert (tmp_path / "killed" / "killed-1").exists()
    assert_same_end(tmp_path / "killed", undisturbed)
    sources = {event["rank"]: (event["source"], event["bytes"] > 0) for event in events if event["event"] == "recovery"}
    assert sources == dict.fromkeys(range(4), ("buddy", True))
    (told,) = {event["text"] for event in events if event["event"] == "weakness"}
    assert told.startswith("in lean mode each shard is kept on")


def test_fewer_nodes_than_copies_ask_for_are_said_and_trained_on(tmp_path: Path, fork_server: dict[str, str]) -> None:
    script = [PARALLEL, "fsdp_uneven", str(tmp_path), "2", "-", "copies=3"]
    with Cluster(tmp_path / "run", script, num_training=2, num_spares=0, num_workers=1, environ=fork_server) as cluster:
        end(cluster)
        told = {event["text"] for event in cluster.events.new() if event["event"] == "weakness"}
    assert told == {"copies=3 needs 4 nodes and there are 2: each shard has 1 besides its own node's"}


def test_ranks_that_ask_for_different_numbers_of_copies_end_the_run_with_both(
    tmp_path: Path, fork_server: dict[str, str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, torch, p2pstate\n"
        "p2pstate.init_process_group()\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "p2pstate.Replicator(model, optimizer, copies=1 + int(os.environ['RANK']))\n"
    )
    with Cluster(
        tmp_path / "run", [str(script)], num_training=2, num_spares=0, num_workers=1, environ=fork_server
    ) as cluster:
        cluster.wait_end(DEADLINE_S)
        assert set(cluster.exit_codes().values()) == {78}, cluster.log_tails()
        assert "rank 0 asks for copies=1 and rank 1 for copies=2" in cluster.log_tails()


def shards_kept(cluster: Cluster, name: str) -> set[str]:
    """Whose shards a node's vault has memory for, by the names of its memory files."""
    folder, found = Path(f"/proc/{cluster.nodes[name].process.pid}/fd"), set()
    for entry in folder.iterdir():
        with suppress(FileNotFoundError):  # the agent opens and closes others meanwhile
            target = str(entry.readlink())
            if target.startswith("/memfd:p2pstate-own"):
                found.add(target.removeprefix("/memfd:p2pstate-").split("-")[0])
    return found


def test_copies_of_former_wards_are_let_go_once_new_partners_have_theirs(
    tmp_path: Path, fork_server: dict[str, str]
) -> None:
    """A node of rack b dies, and one of rack a takes its place: ranks 0 and 1, 2 and 3 were partners until then."""
    script = [PARALLEL, "fsdp_uneven", str(tmp_path), "100000", "-"]
    with Cluster(
        tmp_path / "run", script, num_training=4, num_spares=1, num_workers=1, environ=fork_server, racks="ababa"
    ) as cluster:
        deadline, history = time.monotonic() + DEADLINE_S, cluster.events.new()
        while not any(event["event"] == "step" and event["step"] > 4 for event in history):
            assert time.monotonic() < deadline, cluster.log_tails()
            history = cluster.events.new()
        assert shards_kept(cluster, "node0") == {"own0", "own1"}
        cluster.kill_node("node1")
        expected = {"node0": {"own0", "own2"}, "node2": {"own2", "own0"}, "node3": {"own3", "own1"}}
        expected["node4"] = {"own1", "own3"}
        while {name: shards_kept(cluster, name) for name in expected} != expected:
            assert time.monotonic() < deadline, cluster.log_tails()
            time.sleep(0.05)


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
