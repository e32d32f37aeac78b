"""Failures of the user's code: a step is tried again, in place or by another process, and a failure that stays ends the
run with its reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from mishaps import NUM_STEPS, Outcome, train

WELL = {"node0": 0, "node1": 0}


@pytest.mark.parametrize(
    ("args", "mishaps", "replaced"),
    [
        # DDP cannot be brought back from the middle of backward; who wants to exit is let go
        (
            (),
            [
                *("6:1:forward-raise", "10:2:backward-raise", "14:3:fetch-exit", "18:0:after-odd"),
                *("22:1:forward-exit", "26:3:forward-interrupt", "30:0:forward-raise", "30:2:forward-raise"),
            ],
            [2, 3, 1, 3],
        ),
        (("--fsdp",), ["6:1:forward-odd", "10:2:backward-raise", "14:0:backward-raise", "18:3:after-raise"], []),
    ],
    ids=["ddp", "fsdp"],
)
def test_step_that_raises_is_tried_again_and_training_ends_identical(
    args: tuple[str, ...],
    mishaps: list[str],
    replaced: list[int],
    tmp_path: Path,
    fork_server: dict[str, str],
    without_mishaps: Callable[..., Outcome],
) -> None:
    undisturbed = without_mishaps(*args)
    outcome = train(tmp_path / "disturbed", fork_server, *mishaps, args=args)
    assert undisturbed.codes == outcome.codes == WELL, outcome.log_tails
    assert outcome.replaced() == replaced, outcome.log_tails
    assert len({event["step"] for event in outcome.all("raised")}) == len({spec.split(":")[0] for spec in mishaps})
    assert all(list(steps) == list(range(1, NUM_STEPS + 1)) for steps in outcome.pids)
    assert outcome.digests == undisturbed.digests


@pytest.mark.parametrize(("where", "num_tries", "newest_step"), [("both", 2, 7), ("body", 1, 7)])
def test_exception_that_stays_ends_the_run_with_the_traceback_of_its_rank(
    where: str, num_tries: int, newest_step: int, tmp_path: Path, fork_server: dict[str, str]
) -> None:
    """In a step it is tried again; the loop's body, which cannot be, ends at once."""
    outcome = train(tmp_path, fork_server, f"8:2:{where}-raise")
    assert outcome.codes == {"node0": 1, "node1": 1}, outcome.log_tails
    assert "rank 2 failed in user code: ZeroDivisionError: raised on purpose" in outcome.log_tails
    log = outcome.log(2)
    assert log.count("Traceback (most recent call last)") == num_tries
    last_lines = log.rpartition("Traceback")[2].strip().splitlines()[-2:]
    assert last_lines[0].strip() == 'raise ZeroDivisionError("raised on purpose")'
    assert last_lines[1] == "ZeroDivisionError: raised on purpose"
    assert not any("Traceback" in outcome.log(rank) for rank in (0, 1, 3))
    assert max(outcome.pids[2]) == newest_step


def test_step_that_kills_its_rank_each_time_ends_the_run_by_its_budget(
    tmp_path: Path, fork_server: dict[str, str]
) -> None:
    outcome = train(tmp_path, fork_server, "8:2:both-die", options=("--max-tries-per-step", "3"))
    assert outcome.codes == {"node0": 75, "node1": 75}, outcome.log_tails
    assert "step 8 failed 3 times in a row (--max-tries-per-step 3); the last reason was: rank 2" in outcome.log_tails
    assert outcome.replaced()[:2] == [2, 2]


def test_gradients_that_are_no_numbers_stop_the_run_or_are_left_out_as_asked(
    tmp_path: Path, fork_server: dict[str, str]
) -> None:
    """Those of one rank alone. With batches left out a fault still comes to the same."""
    stopped = train(tmp_path / "stop", fork_server, "7:2:grads-nan", args=("--on-nan", "stop"))
    assert stopped.codes == {"node0": 1, "node1": 1}, stopped.log_tails
    assert "in step 7 gradients of rank 2 are NaN or infinite" in stopped.log_tails
    assert not stopped.replaced()
    skipped = train(tmp_path / "skip", fork_server, "7:2:grads-nan", args=("--on-nan", "skip"))
    assert skipped.codes == WELL, skipped.log_tails
    assert [(event["rank"], event["step"]) for event in skipped.all("skipped")] == [(2, 7)]
    assert not skipped.all("recovery")
    assert all(list(steps) == list(range(1, NUM_STEPS + 1)) for steps in skipped.pids)
    faulted = train(tmp_path / "faulted", fork_server, "7:2:grads-nan", "14:1:forward-die", args=("--on-nan", "skip"))
    assert faulted.codes == WELL, faulted.log_tails
    assert faulted.digests == skipped.digests


def test_gradients_that_are_no_numbers_take_the_run_back_to_a_checkpoint_and_past_the_batches_since(
    tmp_path: Path, fork_server: dict[str, str]
) -> None:
    """Twice: the batch that follows those left out is as bad."""
    args = ("--on-nan", "rollback", "--checkpoint-every", "10")
    outcome = train(tmp_path / "back", fork_server, "12:2:grads-nan", "13:1:grads-nan", args=args)
    assert outcome.codes == WELL, outcome.log_tails
    assert not outcome.replaced()
    assert [event["version"][1] for event in outcome.all("recovery")] == [10] * 8, outcome.log_tails
    for rank in range(4):
        lines = (tmp_path / "back" / "out" / f"batches-{rank}").read_text().splitlines()
        newest = dict(map(int, line.split()) for line in lines)
        assert newest == {step: step if step <= 10 else step + 3 for step in range(1, NUM_STEPS + 1)}
    early = train(tmp_path / "early", fork_server, "3:2:grads-nan", args=(*args[:3], "1000"))
    assert early.codes == {"node0": 1, "node1": 1}, early.log_tails
    assert "gradients of step 3 are NaN or infinite, and no checkpoint from before can be used" in early.log_tails
