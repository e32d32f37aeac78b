"""Every way to write the loop ends bit-identical after kills; every way not to write it says what to do.

Two nodes with one worker each; rank 1 is killed at several points of one run, and the undisturbed run goes on beside
it. See scripts/loop_forms.py and scripts/several_steps.py for the forms and the points.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster import Cluster
from outcome import compare

NUM_RANKS = 2
DEADLINE_S = 120.0  # only a hang takes this long
SCRIPTS = Path(__file__).resolve().parent / "scripts"


@dataclass(frozen=True, slots=True)
class Form:
    name: str
    kills: tuple[str, ...]
    options: tuple[str, ...] = ()
    restarts: bool = False  # whether survivors have to start again, because a newcomer cannot rehearse alone
    script: str = "loop_forms.py"


FORMS = [
    Form("run_with_two_optimizers", ("3:forward", "5:between_optimizers", "7:after_step", "9:body")),
    Form("block_with_scheduler_outside", ("3:backward", "5:before_step", "7:after_block", "9:after_scheduler")),
    Form(
        "block_with_scheduler_outside",
        ("4:backward", "7:after_block"),
        ("--raise-alone",),
        restarts=True,
    ),
    Form("closure", ("3:backward", "5:closure_end", "8:after_step")),
    Form("lbfgs", ("3:call_2", "5:call_3", "8:after_step")),
    Form("scaler", ("3:unscaled", "4:forward", "5:after_step", "8:after_update")),
    Form("accumulate", ("3:micro_2_forward", "6:micro_2_backward", "8:micro_1_backward")),
    Form("micro_blocks", ("3:micro_2_forward", "5:micro_1_after_block", "8:micro_2_after_block")),
    Form("micro_blocks", ("3:micro_2_backward", "6:micro_1_forward"), ("--sharded",)),
    *(
        Form(name, ("3:between", "5:collective", "7:end"), script="several_steps.py")
        for name in ("gan", "zero_redundancy", "in_backward", "scaler_skips")
    ),
    Form("accumulating", ("5:end", "9:between"), script="several_steps.py"),
    Form("carried", ("5:between", "8:end"), script="several_steps.py"),
    Form("every_third", ("6:collective", "7:between", "9:end"), script="several_steps.py"),
]


def start(
    folder: Path,
    arguments: Sequence[str],
    environ: dict[str, str],
    *,
    num_nodes: int = 2,
    script: str = "loop_forms.py",
) -> Cluster:
    command = [str(SCRIPTS / script), *arguments]
    return Cluster(folder, command, num_training=num_nodes, num_spares=0, num_workers=1, environ=environ)


SLOW_FORMS = [
    *(Form(name, ("3:between", "5:collective", "7:end"), script="several_steps.py") for name in ("ppo", "line_search")),
    Form("zero_redundancy", ("3:collective", "5:between"), ("--sharded",), script="several_steps.py"),
    *(
        Form(name, (f"{step}:{point}", f"{step + 1}:{point}"), script="several_steps.py")
        for name in ("gan", "ppo", "line_search", "zero_redundancy", "in_backward", "scaler_skips")
        for step, point in ((6, "between"), (7, "collective"), (8, "end"))
    ),
    Form("accumulating", ("4:between", "8:end"), ("--sharded",), script="several_steps.py"),
    Form("carried", ("4:between", "8:end"), ("--sharded",), script="several_steps.py"),
    # its second model is new, then changes its layout, when a newcomer has settled it in rehearsals
    Form("every_third", ("3:between", "5:between"), restarts=True, script="several_steps.py"),
]


def name_of(form: Form) -> str:
    kills = form.kills if form in SLOW_FORMS else ()
    return "-".join([form.name, *(o.strip("-") for o in form.options), *(kill.replace(":", "_") for kill in kills)])


def finish(clusters: Sequence[Cluster]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while any(cluster.running() for cluster in clusters):
        tails = "\n".join(cluster.log_tails() for cluster in clusters)
        assert time.monotonic() < deadline, f"a run hangs\n{tails}"
        time.sleep(0.02)


@pytest.mark.parametrize(
    "form", [*FORMS, *(pytest.param(form, marks=pytest.mark.slow) for form in SLOW_FORMS)], ids=name_of
)
def test_loop_form_whose_rank_is_killed_ends_bit_identical(
    form: Form, tmp_path: Path, fork_server: dict[str, str]
) -> None:
    undisturbed, faulted = tmp_path / "undisturbed", tmp_path / "faulted"
    plain = [form.name, *form.options, "--out"]
    kills = [argument for kill in form.kills for argument in ("--kill", kill)]
    with (
        start(tmp_path / "a", [*plain, str(undisturbed)], fork_server, script=form.script) as without,
        start(tmp_path / "b", [*plain, str(faulted), *kills], fork_server, script=form.script) as with_kills,
    ):
        finish([without, with_kills])
        for cluster in (without, with_kills):
            assert set(cluster.exit_codes().values()) == {0}, f"{cluster.exit_codes()}\n{cluster.log_tails()}"
    for kill in form.kills:
        assert (faulted / f"killed-{kill.replace(':', '-')}").exists(), f"the kill {kill} did not happen"
    comparison = compare(faulted, undisturbed, NUM_RANKS)
    assert comparison.identical, "\n".join([*comparison.differences, with_kills.log_tails()])
    starts = {event["start"] for event in with_kills.events.new() if event["event"] == "view"}
    assert ("restart" in starts) == form.restarts, f"the rounds began so: {starts}"
    if form.name == "block_with_scheduler_outside":
        logs = "".join(path.read_text() for path in with_kills.folder.glob("logs/node0/*.log"))
        assert "ArithmeticError: 1.0 ranks have added up: garbage" in logs, (
            "user code saw no garbage: nothing is tested"
        )


BAD_CONFIGURATION = 78

# form -> exit code, what the worker and its agent say
MISUSES = {
    "nested_block": (1, "a step began inside another one: leave the first `with state.step():` block before"),
    "block_outside_of_batches": (1, "runs once per turn of `for batch in state.batches():`"),
    "second_block_in_one_turn": (1, "or a second time in one turn"),
    "no_optimizer": (1, "Replicator needs at least one optimizer (a torch.optim.Optimizer) among its arguments"),
    "no_model": (1, "Replicator needs at least one model (a torch.nn.Module) among its arguments"),
    "data_without_state": (1, "data= of type list has no state_dict and no load_state_dict()"),
    "no_process_group": (BAD_CONFIGURATION, "call p2pstate.init_process_group() before Replicator(...)"),
    "raises_in_a_good_step": (1, "a bug of the user's own"),
}


def test_loop_misuse_ends_the_run_with_an_exit_code_and_a_sentence(tmp_path: Path, fork_server: dict[str, str]) -> None:
    clusters = {
        name: start(tmp_path / name, [name, "--out", str(tmp_path)], fork_server, num_nodes=1) for name in MISUSES
    }
    try:
        finish(list(clusters.values()))
        for name, (code, sentence) in MISUSES.items():
            tails = clusters[name].log_tails()
            assert clusters[name].exit_codes() == {"node0": code}, f"{name}\n{tails}"
            logs = list(clusters[name].folder.glob("logs/node0/*.log"))
            assert len(logs) == 1, f"{name}: it was tried again\n{tails}"
            assert sentence in logs[0].read_text(), f"{name}: the worker's log does not say so\n{tails}"
            agent = (clusters[name].folder / "agent-node0.log").read_text()
            assert sentence in agent, f"{name}: the agent does not say so: {agent}"
    finally:
        for cluster in clusters.values():
            cluster.stop()
