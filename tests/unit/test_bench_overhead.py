"""The overhead benchmark's arithmetic: what is counted, compared and shown."""

from __future__ import annotations

from typing import Any

import pytest
from overhead_numbers import (
    DEPTH,
    FORMS,
    KEYS,
    SAVES,
    across_ranks,
    added,
    processor_time,
    protected_share,
    saving,
    slowest,
    span,
    spread,
    summarise,
    targets,
    width_for,
)


def rank(**changes: Any) -> dict[str, Any]:
    """What a rank records: two rounds of two steps."""
    saves = {save: [[0.2, 0.2], [0.4, 0.4]] for save in SAVES}
    return {
        "windows": {"plain": [[0.1, 0.1], [0.1, 0.1]], "protected": [[0.11, 0.13], [0.11, 0.13]]},
        "skipped": [[False, False, False]],
        "protected_s": [0.03],
        "ship": [[30.0, 30.04, 2]],
        "payload_bytes": 1000,
        "unique_bytes": 500.5,
        "vault_bytes": 0,
        "memcpy": [[10.0, 10.02, 2]],
        "socket": [[20.0, 20.04, 4]],
        "saves": {"plain": [[0.1, 0.1], [0.1, 0.1]], **saves},
    } | changes


def test_summary_has_exactly_the_keys_of_the_benchmark() -> None:
    figures = summarise([rank(), rank()])
    assert tuple(figures) == KEYS
    assert KEYS[-4:] == ("torch_save_s", "dcp_save_s", "dcp_async_s", "dcp_async_cached_s")


def test_summary_of_two_ranks_takes_sums_of_bytes_and_the_slowest_of_times() -> None:
    first = rank(vault_bytes=3000)
    second = rank(
        payload_bytes=900, protected_s=[0.05, 0.06, 0.07], ship=[[30.01, 30.06, 2]], memcpy=[[10.01, 10.05, 2]]
    )
    figures = summarise([first, second])
    expected = {
        "payload_bytes": 1000,
        "unique_bytes": 1001,
        "step_s": 0.1,
        "exposed_s": 0.02,
        "exposed_pct": 20.0,
        "protected_share": 1.0,
        "protected_s": 0.06,
        "host_bytes_per_unique_byte": 3000 / 1001,
        "floor_memcpy_s": 0.025,
        "floor_socket_s": 0.01,
        "ship_vs_socket": 0.01 / 0.03,
        "torch_save_s": 0.2,
    }
    assert {key: figures[key] for key in expected} == pytest.approx(expected)


def test_added_time_is_compared_within_a_round_so_that_a_slow_round_costs_nothing() -> None:
    assert added([[0.12, 0.12], [1.02, 1.02]], [[0.1, 0.1], [1.0, 1.0]]) == pytest.approx([0.02, 0.02])
    with pytest.raises(ValueError, match="zip"):
        added([[0.1]], [[0.1], [0.1]])


def test_added_time_of_every_second_step_is_not_lost() -> None:
    assert added([[0.1, 0.3, 0.1, 0.3]], [[0.1, 0.1, 0.1, 0.1]]) == pytest.approx([0.1])


def test_saving_is_compared_with_the_unprotected_windows_among_the_saves() -> None:
    slow = rank()
    slow["saves"]["plain"] = [[0.15, 0.15], [0.15, 0.15]]
    assert saving([slow], "dcp_save").median == pytest.approx(0.15)


@pytest.mark.parametrize(
    ("skipped", "share"),
    [
        ("....", 1.0),
        (".s.s", 0.0),  # step 1 was late for the vote of step 2, which was skipped, and so on
        ("..s.", 1 / 3),  # the version of step 1 was in time, that of step 2 not, step 3 has none
        ("sss.", 0.0),
    ],
)
def test_protected_share_counts_skipped_and_late_versions_as_not_protected(skipped: str, share: float) -> None:
    assert protected_share([[sign == "s" for sign in skipped]]) == pytest.approx(share)


def test_protected_share_does_not_look_across_windows_and_needs_two_steps() -> None:
    assert protected_share([[False, False], [True, False]]) == 0.5
    with pytest.raises(ValueError, match="no two"):
        protected_share([[False], [False]])


def test_across_ranks_is_the_mean_of_every_step() -> None:
    assert across_ranks([[[0.1, 0.2], [0.5]], [[0.3, 0.2], [0.7]]]) == [pytest.approx([0.2, 0.2]), pytest.approx([0.6])]


def test_processor_time_is_what_protection_adds_on_all_ranks_together() -> None:
    busy = {"plain": [0.1, 0.2], "protected": [0.13, 0.23]}
    found = processor_time([{"cpu_s": busy}, {"cpu_s": {"plain": [0.1, 0.1], "protected": [0.11, 0.13]}}])
    assert (found.low, found.high) == (pytest.approx(0.045), pytest.approx(0.055))


def test_span_ends_with_the_last_rank_and_is_divided_by_the_repetitions() -> None:
    assert span([[1.0, 3.0, 4], [2.0, 5.0, 4]]) == 1.0


def test_spread_is_the_median_and_the_middle_half() -> None:
    found = spread([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (found.low, found.median, found.high) == (2.0, 3.0, 4.0)
    assert spread([7.0]).low == 7.0
    with pytest.raises(ValueError, match="nothing"):
        spread([])


def test_slowest_is_the_rank_with_the_largest_median() -> None:
    assert slowest([[1.0, 1.0, 9.0], [2.0, 2.0, 2.0]]).median == 2.0


@pytest.mark.parametrize("num_parameters", [100_000, 5_000_000, 23_000_000, 100_000_000])
def test_width_for_gives_a_model_of_about_the_size_asked_for(num_parameters: int) -> None:
    width = width_for(num_parameters)
    assert width % 16 == 0
    assert DEPTH * (8 * width**2 + 7 * width) == pytest.approx(num_parameters, rel=0.35)


def test_width_for_a_tiny_model_can_still_be_divided_over_four_ranks() -> None:
    assert width_for(1) == 16


@pytest.mark.parametrize("form", FORMS)
def test_targets_are_met_by_perfect_figures_and_missed_by_bad_ones(form: str) -> None:
    good = dict.fromkeys(KEYS, 0.0) | {
        "protected_share": 1.0,
        "host_bytes_per_unique_byte": 4.0,
        "exposed_s": 0.01,
        "protected_s": 0.02,
        "floor_memcpy_s": 0.01,
        "floor_socket_s": 0.01,
        "ship_vs_socket": 0.9,
        "dcp_async_cached_s": 0.02,
    }
    bad = good | {
        "payload_bytes": 1 << 20,
        "protected_share": 0.99,
        "host_bytes_per_unique_byte": 6.0,
        "exposed_s": 0.05,
        "protected_s": 0.05,
        "ship_vs_socket": 0.5,
    }
    assert all(target.met for target in targets(form, good))
    assert not any(target.met for target in targets(form, bad))
    assert len(targets(form, good)) >= 3
