"""Every second in exactly one category: the meter with a clock that is set by hand, and random calls."""

import random

import pytest

from p2pstate.observe.goodput import CATEGORIES, Goodput
from p2pstate.observe.meter import Meter


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Measured:
    def __init__(self) -> None:
        self.clock = Clock()
        self.meter = Meter(self.clock)

    def passes(self, seconds: float) -> None:
        self.clock.now += seconds

    def step(self, seconds: float, usual_s: float = 1.0, *, repeated: bool = False) -> None:
        self.meter.step_begins()
        self.passes(seconds)
        self.meter.step_ends()
        self.meter.committed(usual_s, repeated=repeated)


@pytest.fixture
def measured() -> Measured:
    return Measured()


def test_meter_of_a_loop_without_faults(measured: Measured) -> None:
    measured.passes(5)
    measured.meter.enter("other")
    for _ in range(3):
        with measured.meter.inside("data"):
            measured.passes(0.25)
        measured.meter.step_begins()
        measured.passes(1)
        with measured.meter.inside("protection"):
            measured.passes(0.5)
        measured.meter.step_ends()
        measured.meter.committed(0.0, repeated=False)
        measured.passes(0.125)
    with measured.meter.inside("phase.evaluation"):
        measured.passes(7)
    expected = {"startup": 5, "data": 0.75, "useful": 3, "protection": 1.5, "other": 0.375, "phase.evaluation": 7}
    assert measured.meter.totals() == expected


def test_meter_divides_a_discarded_step_into_vain_unseen_and_unwinding(measured: Measured) -> None:
    measured.meter.enter("other")
    measured.meter.step_begins()
    measured.passes(4)  # the usual second, and three in which nothing was noticed
    measured.passes(0.5)  # since the error
    measured.meter.step_ends()
    measured.meter.discarded(usual_s=1.0, since_error_s=0.5)
    assert measured.meter.totals() == {"repeated": 1, "recovery.detect": 3, "recovery.abort": 0.5}


def test_meter_gives_the_excess_of_the_first_step_to_the_recovery(measured: Measured) -> None:
    measured.meter.enter("other")
    measured.meter.recovered()
    measured.step(1.75)
    measured.step(1.75)
    assert measured.meter.totals() == {"useful": 2.75, "recovery.first_step": 0.75}


def test_meter_counts_a_step_done_again_as_repeated(measured: Measured) -> None:
    measured.meter.enter("other")
    measured.step(1)
    measured.step(1, repeated=True)
    assert measured.meter.totals() == {"useful": 1, "repeated": 1}


def test_meter_that_is_held_knows_one_category(measured: Measured) -> None:
    measured.meter.hold("recovery.start")
    measured.passes(1)
    with measured.meter.inside("data"):
        measured.passes(1)
    measured.meter.step_begins()
    measured.passes(1)
    measured.meter.step_ends()
    measured.meter.release()
    with measured.meter.inside("recovery.view"):
        measured.passes(2)
    assert measured.meter.totals() == {"recovery.start": 3, "recovery.view": 2}


def test_meter_moves_no_more_than_there_is(measured: Measured) -> None:
    with measured.meter.inside("recovery.view"):
        measured.passes(2)
    measured.meter.move("recovery.view", "waiting", 5)
    assert measured.meter.totals() == {"waiting": 2}


def test_meter_keeps_a_step_back_until_its_outcome_is_known(measured: Measured) -> None:
    measured.meter.enter("other")
    measured.meter.step_begins()
    measured.passes(2)
    assert measured.meter.take() == {}
    measured.passes(1)
    measured.meter.step_ends()
    measured.meter.committed(0.0, repeated=False)
    assert measured.meter.take() == {"useful": 3}
    measured.meter.step_begins()
    measured.passes(1)
    assert measured.meter.take(all_of_it=True) == {"repeated": 1}


def test_meter_begins_anew_with_what_earlier_processes_measured(measured: Measured) -> None:
    measured.passes(50)
    measured.meter.restart("startup", {"useful": 10.0})
    measured.passes(1)
    assert measured.meter.totals() == {"useful": 10, "startup": 1}
    assert measured.meter.take() == {"startup": 1}


@pytest.mark.parametrize("seed", range(20))
def test_meter_adds_up_to_the_time_that_passed_whatever_is_called(seed: int, measured: Measured) -> None:
    rng = random.Random(seed)
    meter = measured.meter
    taken = 0.0
    calls = (
        lambda: meter.enter(rng.choice(["data", "other", "protection"])),
        meter.step_begins,
        meter.step_ends,
        lambda: meter.committed(rng.choice([0.0, 0.5]), repeated=rng.random() < 0.3),
        lambda: meter.discarded(rng.choice([0.0, 0.5]), rng.random()),
        meter.recovered,
        lambda: meter.hold("recovery.start"),
        meter.release,
        lambda: meter.move("other", "waiting", rng.random()),
    )
    for _ in range(200):
        measured.passes(rng.random())
        rng.choice(calls)()
        if rng.random() < 0.1:
            taken += sum(meter.take().values())
    assert sum(meter.totals().values()) == pytest.approx(measured.clock.now - 100)
    assert taken <= sum(meter.totals().values()) + 1e-9
    assert min(meter.totals().values()) >= 0


def test_goodput_sums_phases_and_orders_categories() -> None:
    goodput = Goodput({"other": 1.0, "recovery.view": 2.0, "useful": 6.0, "recovery.pull": 1.0})
    assert goodput.wall_s == 10.0
    assert goodput.ratio == pytest.approx(0.6)
    assert list(goodput.by_category().items()) == [("useful", 6.0), ("recovery", 3.0), ("other", 1.0)]
    assert goodput.phases("recovery") == {"view": 2.0, "pull": 1.0}
    assert goodput.sentence() == "goodput 60.0 %, recovery 30.0 %, other 10.0 %"
    assert [line.split("  ")[0] for line in goodput.table()] == ["useful steps", "recovery", "other"]


def test_goodput_of_nothing_is_zero() -> None:
    assert Goodput({}).ratio == 0.0
    assert "nothing" in Goodput({}).sentence()


def test_every_category_of_the_meter_has_a_name_for_people() -> None:
    for category in ("useful", "data", "protection", "saving", "repeated", "recovery", "startup", "shutdown"):
        assert CATEGORIES[category]
