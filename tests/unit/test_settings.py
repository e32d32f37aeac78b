"""settings: what is refused, and ranks that ask for different things."""

from __future__ import annotations

import re
from typing import Any

import pytest

from p2pstate.errors import ConfigError
from p2pstate.settings import CheckpointPolicy, Settings


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"copies": 0}, "copies=0: 1 to 3 copies"),
        ({"copies": 4}, "copies=4: 1 to 3 copies"),
        ({"copies": 1.5}, "copies=1.5: 1 to 3 copies"),
        ({"verify_replicas": -1}, "verify_replicas=-1: compare"),
        ({"on_corruption": "pray"}, "on_corruption='pray': give one of 'report', 'stop', 'repair'"),
        ({"on_corruption": "repair"}, "on_corruption='repair' acts on what verify_replicas= finds"),
        ({"lean": 1}, "lean=1: give True"),
        ({"lean": True, "checkpoint": CheckpointPolicy("/x", 1, None, 1)}, "lean=True keeps no copy on the own node"),
        ({"on_nan": "rollback"}, "on_nan='rollback' goes back to a checkpoint"),
        ({"nan_rollback": 0}, "nan_rollback=0: go back"),
        ({"nan_rollback": 2, "checkpoint": CheckpointPolicy("/x", 1, None, 1)}, "nan_rollback=2 goes back more"),
        ({"every": 0}, "every=0: capture"),
        ({"every": "often"}, "every='often': capture"),
        ({"every": "auto", "max_overhead": 0}, "every='auto' finds the interval"),
        ({"max_overhead": 1.0}, "max_overhead=1.0: a fraction"),
        ({"max_overhead": -0.1}, "max_overhead=-0.1: a fraction"),
    ],
)
def test_settings_without_a_meaning_are_refused(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Settings(**arguments)


def test_checkpoints_in_the_memory_of_one_process_are_refused() -> None:
    with pytest.raises(ValueError, match="ends with it: give storage that all nodes share"):
        CheckpointPolicy("memory://ck", 1, None, 1)


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        (("", 10, None, 2), "checkpoint=''"),
        (("ck", 10, None, 0), "checkpoint_keep=0"),
        (("ck", 10, None, 1.5), "checkpoint_keep=1.5"),
        (("ck", 0, None, 2), "checkpoint_every=0"),
        (("ck", 1.5, None, 2), "checkpoint_every=1.5"),
        (("ck", True, None, 2), "checkpoint_every=True"),
        (("ck", None, -1.0, 2), "checkpoint_every=-1.0 s"),
    ],
)
def test_checkpoint_policy_refuses_what_has_no_meaning(policy: tuple[Any, ...], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        CheckpointPolicy(*policy)


def test_ranks_with_the_same_settings_agree() -> None:
    Settings(copies=2).check_same(1, Settings(copies=2).pack(), 0)
    one, other = (Settings(checkpoint=CheckpointPolicy("s3://b/run", 1, None, 1, stage)) for stage in ("/a", "/b"))
    one.check_same(1, other.pack(), 0)  # each node may stage elsewhere


def test_rank_with_other_settings_is_named_with_both() -> None:
    with pytest.raises(ConfigError, match="rank 2 asks for copies=2 and rank 0 for copies=1: give Replicator"):
        Settings(copies=2).check_same(2, Settings().pack(), 0)
