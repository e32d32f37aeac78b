"""The example's fault injection: it dies where it says, once, by a real SIGKILL.

One process imports torch and forks a victim per specification; each victim writes what it reached into a file.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kill_points import PHASES, Kill

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

# One rank of a job with three blocks and two parameter groups. Arguments: a folder, then specifications.
VICTIMS = """
import json, os, sys, threading
from pathlib import Path
from types import SimpleNamespace
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from kill_points import KillPoints

torch.set_num_threads(1)

def victim(spec, folder, words):
    def say(*text):
        os.write(words, (" ".join(map(str, text)) + "\\n").encode())

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
    first, *others = model.parameters()
    optimizer = torch.optim.AdamW([{"params": [first]}, {"params": others}], lr=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    model[0].register_forward_pre_hook(lambda *_: say("forward begins"))
    model[2].register_forward_hook(lambda *_: say("forward ends"))
    model[2].register_full_backward_hook(lambda *_: say("backward begins"))
    model[0].register_full_backward_hook(lambda *_: say("backward ends"))
    optimizer.register_step_pre_hook(lambda *_: say("gate"))
    optimizer.register_step_post_hook(lambda *_: say("updated"))
    state = SimpleNamespace(rehearsing=True)
    kill = KillPoints([spec], folder, 0, model[1], optimizer)

    def train_step(batch):
        loss = model(torch.ones(3, 2, requires_grad=True)).sum()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        say("step", batch.number)

    step = kill.around(train_step, state)
    step(SimpleNamespace(number=2))  # a rehearsal of the same step must not die
    state.rehearsing = False
    for number in (1, 2, 3):
        step(SimpleNamespace(number=number))
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):
                thread.join(10)
        say("committed", number)
        kill.between(number)
    say("end")

folder = Path(sys.argv[1])
warm = nn.Parameter(torch.ones(1))  # a first optimizer step imports much: once here, not in every victim
warm.grad = torch.ones(1)
torch.optim.AdamW([warm]).step()
for number, spec in enumerate(sys.argv[2:]):
    path = folder / f"words-{number}"
    words = os.open(path, os.O_CREAT | os.O_WRONLY)
    child = os.fork()
    if child == 0:
        victim(spec, folder, words)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps({"spec": spec, "pid": child, "status": status, "words": path.read_text().splitlines()}))
"""

# What a victim said last
LAST_WORDS = {
    "forward": "forward begins",
    "backward": "backward begins",
    "before_gate": "backward ends",
    "in_step": "gate",
    "after_step": "updated",
    "shipping": "step 2",
    "between": "committed 2",
}


def run(folder: Path, specs: list[str], agent: int = 0) -> list[dict[str, Any]]:
    environ = {**os.environ, "PYTHONPATH": str(EXAMPLES), "P2PSTATE_AGENT_PID": str(agent)}
    command = [sys.executable, "-W", "error", "-c", VICTIMS, str(folder), *specs]
    ended = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.fixture(scope="module")
def victims(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """For each phase: the victim, and its successor at the same kill point; and one that no kill concerns."""
    folder = tmp_path_factory.mktemp("kills")
    specs = [f"2:0:{phase}" for phase in PHASES for _ in range(2)]
    found: dict[str, list[dict[str, Any]]] = {}
    for victim in run(folder, [*specs, "2:1:forward"]):
        found.setdefault(victim["spec"], []).append(victim)
    found["markers"] = [{path.name: json.loads(path.read_text())} for path in folder.glob("killed-*")]
    return found


@pytest.mark.parametrize("phase", PHASES)
def test_kill_point_dies_exactly_where_it_says(phase: str, victims: dict[str, list[dict[str, Any]]]) -> None:
    victim = victims[f"2:0:{phase}"][0]
    assert victim["status"] == -signal.SIGKILL
    assert "committed 1" in victim["words"]
    assert victim["words"][-1] == LAST_WORDS[phase]
    (marker,) = (marker for marker in victims["markers"] if f"killed-2-0-{phase}" in marker)
    assert marker[f"killed-2-0-{phase}"].items() >= {"pid": victim["pid"], "rank": 0, "step": 2}.items()


@pytest.mark.parametrize("phase", PHASES)
def test_kill_point_passed_again_does_nothing(phase: str, victims: dict[str, list[dict[str, Any]]]) -> None:
    successor = victims[f"2:0:{phase}"][1]
    (untouched,) = victims["2:1:forward"]
    assert untouched["words"][-1] == "end"
    assert (successor["status"], successor["words"]) == (0, untouched["words"])


def test_kill_point_of_a_node_kills_the_agent_first(tmp_path: Path) -> None:
    agent = subprocess.Popen(["sleep", "60"])
    try:
        (victim,) = run(tmp_path, ["2:0:in_step:node"], agent.pid)
        assert victim["status"] == -signal.SIGKILL
        assert agent.wait(10) == -signal.SIGKILL
    finally:
        agent.kill()
        agent.wait()


@pytest.mark.parametrize("text", ["2:0", "2:0:nap", "2:0:forward:rack", "2:0:forward:node:x"])
def test_kill_point_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"--kill {text}: expected STEP:RANK:PHASE"):
        Kill.parse(text)


def test_kill_point_text_is_read_back() -> None:
    assert Kill.parse("7:1:backward") == Kill(7, 1, "backward")
    assert Kill.parse("7:1:backward:node").marker == "killed-7-1-backward-node"
