"""export: which tensors are weights, and whose, where parts of a model have one name on several ranks."""

from __future__ import annotations

from pathlib import Path

import durable_site
import pytest
from durable_site import Site, at

from p2pstate.durable.export import differing, keys_of, read_weights, weight_names
from p2pstate.durable.manifest import Manifest, Row
from p2pstate.state.encoding import encode
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


def test_average_of_a_model_is_none_of_its_weights() -> None:
    ema = Row("model_ema/w", "model_ema.w", "float32", (2,), (0,))
    manifest = Manifest(("run", "nonce"), Version(1, 10), 1, 0.0, {}, {0: (row("w", "model.w"), ema)}, {})
    assert weight_names(manifest) == {"w": "model.w"}


def test_weights_are_what_the_models_state_dict_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No buffer that is not persistent, and a tied tensor under all of its names only where that is asked for."""
    values = encode({"optimizers": {}, "non_persistent": ["model/norm.mean"]})
    monkeypatch.setattr(durable_site, "values", lambda rank, step: values)
    site, root = Site(), tmp_path / "000001-step10"
    site.save(root, site.capture(10))
    assert sorted(read_weights(at(root))) == ["bias", "w"]
    assert sorted(read_weights(at(root), every_name=True)) == ["alias", "bias", "head.w", "w"]
