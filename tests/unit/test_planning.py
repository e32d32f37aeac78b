"""`p2pstate plan`: units, formulas against simulations, what a plan says, the command."""

import json
import math
import re
import sys
from pathlib import Path

import pytest

from p2pstate.cli import main
from p2pstate.placement import partners
from p2pstate.planning import formulas, units
from p2pstate.planning import plan as planning
from p2pstate.planning.inputs import Inputs
from p2pstate.planning.plan import goodputs, make_plan
from p2pstate.planning.simulation import Cluster, neighbours, simulate_goodput, simulate_runs
from p2pstate.planning.units import DAY_S, HOUR_S, MONTH_S, percent_text


@pytest.fixture(autouse=True)
def _short_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "SIMULATED_FAILURES", 6000)


@pytest.mark.parametrize(
    ("text", "unit", "seconds"),
    [
        ("90", "s", 90),
        ("10000", "h", 3.6e7),
        ("1.5h", "s", 5400),
        ("10 min", "h", 600),
        ("20ms", "s", 0.02),
        ("7d", "s", 604800),
        ("1,000 s", "h", 1000),
        ("0", "h", 0),
    ],
)
def test_duration_as_typed_is_seconds(text: str, unit: str, seconds: float) -> None:
    assert units.parse_duration(text, unit) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "h", "1.5x", "-3s", "nan", "inf", "1e999", "3 parsecs", "--"])
def test_duration_that_is_none_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        units.parse_duration(text, "s")


@pytest.mark.parametrize(("text", "num_bytes"), [("980GB", 980e9), ("1.2 TB", 1.2e12), ("16GiB", 2**34), ("512", 512)])
def test_size_as_typed_is_bytes(text: str, num_bytes: float) -> None:
    assert units.parse_bytes(text) == num_bytes


def test_share_as_printed_has_no_exponent() -> None:
    shares = {1e-32: "0 %", 2e-8: "0.000002 %", 3e-5: "0.003 %", 0.005: "0.50 %", 0.5: "50.0 %", 0.99999: "> 99.99 %"}
    assert {share: percent_text(share) for share in shares} == shares


def test_count_and_share_as_typed() -> None:
    assert units.parse_count("70B") == 70e9
    assert units.parse_count("8e9") == 8e9
    assert units.parse_share("1%") == units.parse_share("0.01") == 0.01
    with pytest.raises(ValueError, match="70Q"):
        units.parse_count("70Q")


@pytest.mark.parametrize("seconds", [0.004, 1.0, 59.0, 61.0, 7200.0, 3 * DAY_S, 40 * DAY_S])
def test_duration_as_printed_is_read_back(seconds: float) -> None:
    assert units.parse_duration(units.duration_text(seconds), "s") == pytest.approx(seconds, rel=0.01)


def test_formula_of_goodput_agrees_with_simulated_lives() -> None:
    for arguments in ((600, 30, 0, 900, 7200), (10, 0.1, 2, 30, 15000), (1800, 5, 600, 750, 3600)):
        mean, error = simulate_goodput(*arguments, num_failures=20_000, seed=3)
        assert abs(mean - formulas.goodput(*arguments)) < 5 * error, arguments


def test_formula_of_goodput_without_failures_loses_only_the_saves() -> None:
    assert formulas.goodput(100, 10, 0, 60, 1e12) == pytest.approx(100 / 110)
    assert formulas.goodput(1e9, 10, 0, 60, 1000) == 0.0


@pytest.mark.parametrize(("save_s", "mtbf_s"), [(600, 10_800), (60, 10_800), (5, 3600)])
def test_daly_interval_is_better_than_half_and_twice_of_it(save_s: float, mtbf_s: float) -> None:
    best = formulas.daly_interval_s(save_s, mtbf_s)

    def value(interval_s: float) -> float:
        return formulas.goodput(interval_s, save_s, 0, 300, mtbf_s)

    assert value(best) > max(value(best / 2), value(best * 2))
    assert value(best) >= value(formulas.young_interval_s(save_s, mtbf_s))


def test_daly_interval_of_a_save_longer_than_life_is_the_mean_life() -> None:
    assert formulas.daly_interval_s(1000, 400) == 400


def test_break_even_overhead_gives_exactly_the_other_goodput() -> None:
    overhead = formulas.break_even_overhead(0.9, 10, 1, 30, 5000)
    assert formulas.goodput(10, 10 * overhead, 1, 30, 5000) == pytest.approx(0.9)
    assert formulas.break_even_overhead(0.9999, 10, 1, 30, 5000) < 0  # never pays


def cluster(num_nodes: int, copies: int = 1, **fields: float) -> Cluster:
    names = [f"n{node}" for node in range(num_nodes)]
    racks = {name: {"rack": str(node // 4)} for node, name in enumerate(names)}
    defaults = {"mtbf_s": 3600.0, "duration_s": MONTH_S, "num_spares": 1000, "repair_s": DAY_S, "rack_nodes": 4}
    return Cluster(partners=partners(names, copies, racks), **{**defaults, **fields})  # type: ignore[arg-type]


def test_formula_of_losses_agrees_with_simulated_partners() -> None:
    for copies, unprotected_s in ((1, 1800.0), (2, 4000.0)):
        simulated = simulate_runs(cluster(12, copies, unprotected_s=unprotected_s), num_runs=60, seed=5)
        expected = MONTH_S * formulas.loss_rate(12 * 3600.0, 12, copies, unprotected_s)
        assert simulated.losses_per_run == pytest.approx(expected, rel=0.15), copies


def test_formula_of_goodput_agrees_with_simulated_runs() -> None:
    spaced = cluster(32, interval_s=20.0, stall_s=1.0, durable_after_s=5.0, buddy_recovery_s=60.0, unprotected_s=0.0)
    simulated = simulate_runs(spaced, num_runs=60, seed=1)
    expected = formulas.goodput(20, 1, 5, 60, 3600)
    assert abs(simulated.goodput - expected) < max(5 * simulated.goodput_error, 1e-4)


def test_simulated_nodes_under_repair_are_as_many_as_queueing_theory_says() -> None:
    """Poisson arrivals, everybody served at once (M/G/infinity): a Poisson number, here with mean 24."""
    simulated = simulate_runs(cluster(64), num_runs=100, seed=2)
    assert 24 + 2 * math.sqrt(24) < simulated.most_away < 24 + 6 * math.sqrt(24)


def test_simulation_with_the_same_seed_gives_the_same_answer() -> None:
    assert simulate_runs(cluster(8), num_runs=5, seed=9) == simulate_runs(cluster(8), num_runs=5, seed=9)
    assert simulate_runs(cluster(8), num_runs=5, seed=9) != simulate_runs(cluster(8), num_runs=5, seed=8)


def test_racks_take_both_copies_of_neighbours_and_not_of_nodes_apart() -> None:
    apart = cluster(32, rack_share=0.05, unprotected_s=1.0)
    beside = Cluster(**{name: getattr(apart, name) for name in apart.__slots__} | {"partners": neighbours(32, 1)})
    assert simulate_runs(apart, num_runs=10, seed=4).num_runs == 10
    assert simulate_runs(apart, num_runs=10, seed=4).chance_of_loss == 0.0
    lost = simulate_runs(beside, num_runs=10, seed=4)
    assert lost.losses_per_run == pytest.approx(0.05 * MONTH_S / 3600, rel=0.3)
    assert lost.chance_of_loss == 1.0


def test_two_copies_are_lost_less_often_than_one() -> None:
    one, two = (simulate_runs(cluster(12, copies, unprotected_s=5000.0), num_runs=30, seed=6) for copies in (1, 2))
    assert two.losses_per_run < one.losses_per_run / 3


def test_too_few_spares_make_runs_wait_and_lower_goodput() -> None:
    enough, none = (simulate_runs(cluster(32, num_spares=count), num_runs=10, seed=7) for count in (1000, 0))
    assert (enough.chance_of_waiting, enough.waiting_share) == (0.0, 0.0)
    assert none.chance_of_waiting == 1.0
    assert none.goodput < enough.goodput - 0.5 * none.waiting_share


def test_neighbours_are_rings_of_consecutive_nodes() -> None:
    assert neighbours(5, 1) == [(1,), (0,), (3,), (4,), (2,)]
    assert neighbours(1, 1) == [()]


def test_recovery_from_memory_is_worth_more_where_failures_are_frequent() -> None:
    often, seldom = (goodputs(Inputs(1024, mtbf_h * HOUR_S)) for mtbf_h in (1_000, 1_000_000))
    assert often["p2pstate"] > often["async_checkpoint"] > often["checkpoint"]
    assert seldom["p2pstate"] < seldom["async_checkpoint"]


def test_plan_recommends_with_the_reason() -> None:
    assert make_plan(Inputs(1024, 10_000 * HOUR_S)).recommended == "p2pstate"
    seldom = make_plan(Inputs(16, 1e6 * HOUR_S))
    assert seldom.recommended != "p2pstate"
    assert "failures are too rare" in seldom.reason
    assert "come faster than anything recovers" in make_plan(Inputs(100_000, 10 * HOUR_S)).reason
    assert "one node" in make_plan(Inputs(8, 10_000 * HOUR_S)).reason
    small = make_plan(Inputs(1024, 10_000 * HOUR_S, host_bytes_per_node=1e9))
    assert small.recommended != "p2pstate"
    assert "host memory" in small.reason


def test_plan_whose_versions_do_not_fit_a_step_copies_fewer() -> None:
    plan = make_plan(Inputs(64, 10_000 * HOUR_S, step_s=1.0, link_bytes_per_s=25e9))
    assert plan.inputs.copy_s == pytest.approx(980e9 / 8 / 25e9)
    assert plan.copy_every_steps == 5
    assert plan.policy("p2pstate").interval_s == 5.0
    assert any("one step in 5" in note for note in plan.notes)


def test_plan_of_more_spares_never_waits() -> None:
    plan = make_plan(Inputs(1024, 5_000 * HOUR_S))
    assert plan.simulated.chance_of_waiting <= 0.02
    short = make_plan(Inputs(1024, 5_000 * HOUR_S, num_spares=1))
    assert short.simulated.chance_of_waiting > 0.9
    assert any("too few" in note for note in short.notes)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"num_gpus": 12}, "whole number of nodes"),
        ({"copies": 4}, "copies is 4"),
        ({"step_s": 0.0}, "step_s is 0"),
        ({"overhead": -0.1}, "overhead is -0.1"),
        ({"node_share": 1.5}, "node_share is 1.5"),
        ({"storage": "tape"}, "fsx"),
        ({"num_gpus": 10_000_000}, "planned for"),
        ({"bytes_per_param": 1e300}, "bytes_per_param is 1e"),
        ({"step_s": 1e-300}, "step_s is 1e-300"),
        ({"price_per_node_hour": math.nan}, "price_per_node_hour"),
    ],
)
def test_inputs_that_make_no_sense_are_refused_by_name(fields: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Inputs(**{"num_gpus": 16, "gpu_mtbf_s": HOUR_S, **fields})  # type: ignore[arg-type]


def test_command_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpus", "2304", "--mtbf", "10000", "--within", "30min", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["job_mtbf_h"] == pytest.approx(10_000 / 2304)
    assert found["inputs"]["num_nodes"] == 288
    assert found["inputs"]["state_bytes"] == 980e9
    assert {"within_s": 1800.0, "chance": pytest.approx(1 - math.exp(-0.5 * 0.2304))} in found["chance_of_failure"]
    assert found["goodput"]["p2pstate"] > found["goodput"]["async_checkpoint"] > found["goodput"]["checkpoint"]
    assert found["recommendation"]["policy"] == "p2pstate"
    assert (int(found["pod_memory"].removesuffix("Gi")) - 1) * 2**30 < found["host_bytes_per_node"]
    assert int(found["pod_memory"].removesuffix("Gi")) * 2**30 >= found["host_bytes_per_node"]
    assert found["copies"]["every_step_fits"] is True
    assert {each["copies"] for each in found["simulation"]} == {1, 2}


def test_command_prints_a_page_that_names_all_three_ways(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--gpus", "32", "--failure-every", "1.9h", "--measured-gpus", "608", "--storage", "nvme"]
    assert main(["plan", *arguments]) == 0
    page = capsys.readouterr().out
    assert "every 36.1 h on average" in page
    for title in ("checkpointing", "async checkpointing", "p2pstate", "host memory", "break-even", "spares", "take "):
        assert f"\n{title}" in page
    assert "note: --storage nvme" in page
    assert max(map(len, page.splitlines()[:-5])) <= 120


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--gpus", "8"], "--mtbf"),
        (["--gpus", "8", "--mtbf", "0"], "more than zero"),
        (["--gpus", "0", "--mtbf", "1"], "--gpus is 0"),
        (["--gpus", "eight", "--mtbf", "1"], "'eight'"),
        (["--gpus", "8", "--mtbf", "1", "--copies", "9"], "--copies is 9"),
        (["--gpus", "8", "--mtbf", "1", "--yearly-rate", "1%"], "not allowed with"),
        (["--gpus", "8", "--mtbf", "1", "--measured-gpus", "4"], "--failure-every"),
        (["--gpus", "8", "--failure-every", "1", "--measured-gpus", "0"], "--measured-gpus have to be more than zero"),
        (["--gpus", "8", "--mtbf", "10,5"], "a point goes before decimals"),
        (["--gpus", "8", "--mtbf", "1e300"], "failures of one GPU, in seconds, is 3.6e+303"),
        (["--gpus", "8", "--mtbf", "1", "--price", "5 pounds"], "'5 pounds' is no price"),
        (["--gpus", "8", "--mtbf", "1", "--step-time", "fast"], "'fast'"),
        (["--gpus", "8", "--mtbf", "1", "--storage", "tape"], "tape"),
        (["--gpus", "8", "--mtbf", "1", "--plot", "/nowhere/plan.png"], "/nowhere"),
    ],
)
def test_command_refuses_bad_input_in_words(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    try:
        code = main(["plan", *arguments])
    except SystemExit as error:
        code = int(str(error.code))
    assert code == 2
    shown = capsys.readouterr().err
    assert text in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_command_draws_a_picture(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plan.{suffix}"
    assert main(["plan", "--gpus", "256", "--mtbf", "10000", "--plot", str(path)]) == 0
    assert path.stat().st_size > 10_000
    assert "p2pstate" in capsys.readouterr().out


def test_command_without_matplotlib_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plan", "--gpus", "16", "--mtbf", "10000", "--plot", "plan.png"]) == 2
    assert "pip install 'p2pstate[plot]'" in capsys.readouterr().err


def write_run(folder: Path, *, with_failure: bool) -> None:
    """One rank, 200 steps of half a second; after 100 of them a process died and 20 s passed."""
    clock = {"until": 0.0, "seconds": {"useful": 0.5, "protection": 0.01}}
    events = [{"t": 0.0, "event": "view", "nonce": "a"}, {"t": 0.0, "event": "worker_started", "rank": 0, "pid": 1}]
    t = 0.0
    for number in range(1, 201):
        t += 0.51
        if with_failure and number == 101:
            events += [
                {"t": t, "event": "worker_exited", "rank": 0, "pid": 1, "cause": "signal 9"},
                {"t": t, "event": "abort", "round": 1, "reason": "rank 0 died"},
                {"t": t, "event": "worker_started", "rank": 0, "pid": 2},
            ]
            t += 20
        events.append({"t": t, "event": "step", "rank": 0, "step": number, "clock": {**clock, "until": t}})
    lines = [json.dumps({"node": "n0", **event}) + "\n" for event in events]
    (folder / "events-n0.jsonl").write_text("".join(lines))


def test_command_takes_the_rate_and_more_from_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, with_failure=True)
    assert main(["plan", "--gpus", "64", "--run-dir", str(tmp_path), "--overhead", "5%", "--json"]) == 0
    inputs = json.loads(capsys.readouterr().out)["inputs"]
    assert inputs["gpu_mtbf_s"] == pytest.approx(200 * 0.51 + 20, rel=0.01)
    assert inputs["step_s"] == pytest.approx(0.5)
    assert inputs["vault_recovery_s"] == pytest.approx(20, rel=0.01)
    assert inputs["node_share"] == 0.0
    assert inputs["overhead"] == 0.05  # what is given counts more than what was measured


def test_command_with_a_run_without_failures_says_that_it_tells_no_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, with_failure=False)
    assert main(["plan", "--gpus", "64", "--run-dir", str(tmp_path)]) == 2
    assert "no failure happened" in capsys.readouterr().err
