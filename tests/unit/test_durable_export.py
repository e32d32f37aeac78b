"""export: which tensor of a checkpoint is whose, where parts of a model have one name on several ranks."""

from __future__ import annotations

from p2pstate.durable.export import differing, keys_of
from p2pstate.durable.manifest import Manifest, Row
from p2pstate.types import Version


def row(name: str, key: str) -> Row:
    return Row(f"model/{name}", key, "float32", (2,), (0,))


def test_ranks_that_share_a_stage_have_what_the_first_of_them_wrote() -> None:
    shared = {
        (0, 1): (row("up", "p2pstate.rank0.model.up"),),
        (2, 3): (row("up", "p2pstate.rank2.model.up"), row("head", "p2pstate.rank2.model.head")),
    }
    own = {rank: (row("whole", "model.whole"),) for rank in range(4)}
    manifest = Manifest(("run", "nonce"), Version(1, 10), 4, 0.0, {}, own, shared)
    assert [keys_of(manifest, rank)["model.up"] for rank in range(4)] == [
        *["p2pstate.rank0.model.up"] * 2,
        *["p2pstate.rank2.model.up"] * 2,
    ]
    assert keys_of(manifest, 3)["model.whole"] == "model.whole"
    assert differing(manifest) == ["up"]
