"""description: what a person is told about the copies."""

from __future__ import annotations

from dataclasses import replace

import torch

from p2pstate.description import LeafGroup, describe, leaf_groups
from p2pstate.memory_need import RankNeed
from p2pstate.replicas import Replicas
from p2pstate.slots import slot_bytes
from p2pstate.state import Collected, Leaf

MIB = 1 << 20
TWO_BY_TWO = ["a", "a", "b", "b"]
NEEDS = [RankNeed(MIB, 0)] * 4
GROUP = LeafGroup("parameters", 3, 5 * MIB, MIB)


def test_leaves_are_grouped_by_kind_and_by_who_holds_them() -> None:
    def leaf(name: str, num_bytes: int, *holders: int) -> Leaf:
        return Leaf(name, torch.zeros(num_bytes, dtype=torch.uint8), holders)

    leaves = [
        leaf("data/position", 1, 0),
        leaf("model/weight", 10, 0, 2),  # on both nodes
        leaf("model/codes/inner", 20, 0, 1),  # on this node only
        leaf("model/running_mean", 3, 0),
        leaf("optimizer/weight/exp_avg", 10, 0, 2),
        leaf("optimizer1/codes/exp_avg", 20, 0, 1),
        leaf("rng/torch", 5, 0),
    ]
    found = leaf_groups(Collected(leaves, b"12345678", {}), {"model/weight", "model/codes"}, [0, 0, 1, 1])
    assert found == (
        LeafGroup("data", 1, 1, 1),
        LeafGroup("parameters", 2, 30, 20),
        LeafGroup("buffers", 1, 3, 3),
        LeafGroup("optimizer", 2, 30, 20),
        LeafGroup("rng", 1, 5, 5),
        LeafGroup("plain values", 1, 8, 8),
    )


def test_leaf_that_should_be_alike_and_is_not_is_held_by_nobody_else() -> None:
    leaves = [Leaf("model/weight", torch.zeros(6, dtype=torch.uint8), (0, 2))]
    replicas = Replicas(0, every=0)
    replicas.adopt([[0, [[[0, 2], "model/weight"]]]])
    found = leaf_groups(replicas.applied(Collected(leaves, b"", {})), {"model/weight"}, [0, 0, 1, 1])
    assert found[0] == LeafGroup("parameters", 1, 6, 6)


def test_loss_of_a_node_with_a_partner_is_survived_from_there() -> None:
    found = describe(1, [GROUP], TWO_BY_TWO, NEEDS, copies=1, lean=False, committed_step=8, protected_step=7)
    assert found.copies_on == ("a", "b")
    assert [(node.name, node.ranks, node.survived) for node in found.nodes] == [
        ("a", (0, 1), True),
        ("b", (2, 3), True),
    ]
    assert found.nodes[0].if_lost == (
        "a spare node takes over ranks 0, 1, or the run waits for one; step 7 comes from the memory of b"
    )
    assert found.nodes[0].memory_bytes == 8 * slot_bytes(MIB)
    assert found.steps_at_risk == 1
    assert "protected: step 7; committed: step 8; a version after every step\n" in str(found)
    adapted = replace(found, every=3, adapting=True)
    assert "a version every 3 steps, adapted to what it costs (every='auto')\n" in str(adapted)


def test_lean_copy_on_one_node_is_lost_with_it() -> None:
    found = describe(0, [], ["a", "b"], NEEDS[:2], copies=1, lean=True, committed_step=3, protected_step=3)
    assert found.copies_on == ("b",)
    assert not found.nodes[1].survived
    assert found.nodes[1].if_lost == "every copy of the state of rank 0 is lost with it: the run ends"
    with_disk = describe(0, [], ["a", "b"], NEEDS[:2], copies=1, lean=True, writes_to_disk=True, protected_step=3)
    assert with_disk.nodes[1].if_lost.endswith("the run resumes from its newest checkpoint")


def test_lean_with_two_copies_survives_the_loss_of_a_node() -> None:
    found = describe(0, [], ["a", "b", "c"], NEEDS[:3], copies=2, lean=True, committed_step=3, protected_step=3)
    assert all(node.survived for node in found.nodes)


def test_node_that_is_alone_takes_everything_with_it() -> None:
    found = describe(0, [], ["a", "a"], NEEDS[:2], copies=1, lean=False, committed_step=3, protected_step=3)
    assert found.copies_on == ("a",)
    assert found.nodes[0].if_lost == "every copy of the state of ranks 0, 1 is lost with it: the run ends"


def test_before_anything_is_protected_a_loss_starts_training_anew() -> None:
    found = describe(0, [], TWO_BY_TWO, NEEDS, copies=1, lean=False)
    assert not found.nodes[0].survived
    assert found.nodes[0].if_lost == "no step is protected yet: training starts anew"


def test_text_has_sizes_places_and_consequences() -> None:
    text = str(describe(1, [GROUP], TWO_BY_TWO, NEEDS, copies=1, lean=False, committed_step=8, protected_step=7))
    here, there = "a spare node takes over ranks 0, 1", "a spare node takes over ranks 2, 3"
    assert text.splitlines() == [
        "rank 1 on a, by kind: bytes, and of these bytes that no other node holds anyway",
        "  parameters           5.0 MiB     1.0 MiB  3 leaves",
        "copies of shard 1: a, b",
        "protected: step 7; committed: step 8; a version after every step",
        "nodes: host memory for copies, and what happens if the node dies now",
        f"  a                    8.7 MiB  {here}, or the run waits for one; step 7 comes from the memory of b",
        f"  b                    8.7 MiB  {there}, or the run waits for one; step 7 comes from the memory of a",
    ]
