"""Published figures about failures, checkpoints and money: each follows from the formulas, to the digits printed."""

import json
import math
from pathlib import Path

import pytest

from p2pstate.cli import main
from p2pstate.planning import formulas
from p2pstate.planning.inputs import Inputs
from p2pstate.planning.plan import goodputs
from p2pstate.planning.units import DAY_S, HOUR_S, MONTH_S

MIN_S = 60.0


@pytest.mark.parametrize(("num_gpus", "percent"), [(256, 19), (1024, 57)])
def test_published_one_percent_a_year_gives_the_chance_of_a_failure_in_a_month(num_gpus: int, percent: int) -> None:
    mtbf_s = formulas.job_mtbf_s(formulas.mtbf_of_yearly_rate_s(0.01), num_gpus)
    assert round(100 * formulas.chance_of_failure(mtbf_s, MONTH_S)) == percent


def test_published_interval_scales_from_608_to_32_gpus() -> None:
    gpu_mtbf_s = 1.9 * HOUR_S * 608
    assert round(formulas.job_mtbf_s(gpu_mtbf_s, 32) / HOUR_S) == 36


@pytest.mark.parametrize(("interval_h", "percent"), [(2.0, 64), (0.5, 91)])
def test_published_466_failures_in_54_days_leave_so_much_work(interval_h: float, percent: int) -> None:
    rate = 466 / (54 * DAY_S)
    assert round(rate * DAY_S, 1) == 8.6
    assert round(100 * formulas.work_kept(rate, interval_h * HOUR_S)) == percent


@pytest.mark.parametrize(("num_gpus", "expected_s"), [(64, 156 * HOUR_S), (512, 19.5 * HOUR_S), (4096, 2.4 * HOUR_S)])
def test_published_10000_hours_per_gpu_give_the_interval_of_the_job(num_gpus: int, expected_s: float) -> None:
    assert formulas.job_mtbf_s(10_000 * HOUR_S, num_gpus) == pytest.approx(expected_s, rel=0.02)


def test_published_16000_gpus_fail_every_37_and_a_half_minutes() -> None:
    assert formulas.job_mtbf_s(10_000 * HOUR_S, 16_000) == 37.5 * MIN_S


def test_published_intervals_of_young_and_daly() -> None:
    assert formulas.young_interval_s(10 * MIN_S, 180 * MIN_S) == pytest.approx(60 * MIN_S)
    assert round(formulas.daly_interval_s(10 * MIN_S, 180 * MIN_S) / MIN_S, 1) == 53.5


@pytest.mark.parametrize(("billions", "state_gb", "weights_gb"), [(8, 112, 16), (70, 980, 140), (405, 5670, 810)])
def test_published_sizes_of_states_and_weights(billions: int, state_gb: int, weights_gb: int) -> None:
    def size(bytes_per_param: float) -> float:
        inputs = Inputs(8, HOUR_S, num_params=billions * 1e9, bytes_per_param=bytes_per_param)
        return inputs.state_bytes / 1e9

    assert size(14) == state_gb
    assert size(2) == weights_gb


def test_published_costs_of_256_nodes_that_wait_for_20_minutes() -> None:
    cost = formulas.idle_cost(256, 98.32, 20 * MIN_S)
    assert math.floor(cost / 10) * 10 == 8380  # 8,389.97: published as 8,390
    assert round(cost / 10) * 10 == 8390
    assert round(8 * 30 * cost / 1e5) / 10 == 2.0  # million, eight times a day for a month
    cheaper = formulas.idle_cost(256, 55, 20 * MIN_S)
    assert round(cheaper) == 4693
    assert round(30 * cheaper) == 140_800  # once a day for a month


def test_published_daily_checkpoint_loses_12_hours() -> None:
    assert formulas.mean_lost_s(DAY_S) == 12 * HOUR_S


def test_published_costs_and_lost_work_are_what_the_command_says(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = ["--gpus", "2048", "--failure-every", "3h", "--price", "$98.32"]
    policy = ["--interval", "2h", "--restart-time", "20min", "--load-time", "0"]
    assert main(["plan", *cluster, *policy, "--json"]) == 0
    thumb = json.loads(capsys.readouterr().out)["rules_of_thumb"]
    assert thumb["lost_work_s"] == HOUR_S
    assert thumb["goodput_lost_work_only"] == pytest.approx(1 - 1 / 3)
    assert round(thumb["cost_per_restart"]) == 8390
    assert round(thumb["restarts_cost_per_month"] / 1e5) == 20


def test_published_six_phases_of_a_restart_add_up() -> None:
    phases_min = {"detect": (0.5, 0.5), "kill": (1, 1), "replace": (3, 5), "groups": (2, 5), "load": (5, 20)}
    phases_min["resume"] = (1, 1)
    assert [sum(limits) for limits in zip(*phases_min.values(), strict=True)] == [12.5, 32.5]


# What docs/published-figures.md says does not follow from its own formula, and what does.

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "published-figures.md").read_text()


def test_page_671_billion_parameters_are_not_5_terabytes() -> None:
    state_bytes = Inputs(8, HOUR_S, num_params=671e9).state_bytes
    assert f"**{state_bytes / 1e12:.2f} TB**" in PAGE
    assert state_bytes > 1.8 * 5e12


@pytest.mark.parametrize(("name", "interval_s"), [("2 h", 2 * HOUR_S), ("30 min", 30 * MIN_S), ("10 min", 10 * MIN_S)])
def test_page_goodput_of_three_checkpoint_policies(name: str, interval_s: float) -> None:
    mtbf_s = 54 * DAY_S / 466
    found = [formulas.work_kept(1 / mtbf_s, interval_s)]
    found += [formulas.goodput(interval_s, MIN_S, 0.0, restart_min * MIN_S, mtbf_s) for restart_min in (12.5, 32.5)]
    assert " | ".join([f"| {name}", *(f"{100 * value:.1f} %" for value in found)]) in PAGE


def test_page_goodput_of_copies_on_the_same_cluster() -> None:
    inputs = Inputs(16_384, 54 * DAY_S / 466 * 16_384, num_params=405e9, measured_save_s=MIN_S, interval_s=30 * MIN_S)
    assert f"**{100 * goodputs(inputs)['p2pstate']:.1f} %**" in PAGE
