"""Cases that people reported about systems of this kind: copies (A), one moment (B), state (C), random state (D).

``SHOWN_BY`` says which tests show each case; those that no other file has are here, named by the case. An id is the
letter and number under which the case is known in this project.
"""

from __future__ import annotations

import ast
import mmap
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from groups_in_processes import run_alone
from state_zoo import Codes, assert_same, bits, image_of, restore
from torch import nn

from p2pstate.state import Layout, TrainingState

ROOT = Path(__file__).resolve().parents[2]
ZOO = "tests/proc/test_parallelisms.py::test_state_zoo_survives_a_worker_and_a_node_as_on_stock_gloo"
FORMS = "tests/proc/test_loop_forms.py::test_loop_form_whose_rank_is_killed_ends_bit_identical"
KILLS = "tests/proc/test_kill_matrix.py::test_kill_at_every_point_ends_bit_identical"
DAMAGED = "tests/proc/test_damaged_copies.py"
STATE = "tests/unit/test_state_"

SHOWN_BY: dict[str, tuple[str, ...]] = {
    "A1": (
        ZOO,
        f"{STATE}naming.py::test_collect_of_a_flattenable_subclass_gives_its_inner_tensors",
        "tests/unit/test_replicate.py::test_byte_changed_on_the_way_is_detected_and_the_copy_never_published",
        f"{DAMAGED}::test_owner_is_lost_and_the_copy_is_damaged_an_older_one_is_resumed_and_without_one_the_run_says_so",
        "tests/unit/test_slots.py::test_slot_with_a_flipped_bit_fails_its_digest",
    ),
    "A2": (f"{STATE}optimizers.py::test_restore_of_odd_state_keeps_types_dtypes_and_bits", ZOO),
    "A3": (
        f"{STATE}naming.py::test_restore_of_any_view_without_overlap_writes_its_elements_only",
        f"{STATE}naming.py::test_capture_of_an_impossible_tensor_is_refused_by_name",
        f"{STATE}restore.py::test_write_into_any_strides_touches_only_the_view",
        ZOO,
    ),
    "A4": (
        f"{STATE}layout.py::test_layout_write_of_any_dtype_keeps_every_bit",
        f"{STATE}layout.py::test_layout_write_of_conjugate_and_negative_views_stores_their_values",
        f"{STATE}naming.py::test_restore_of_a_dtype_that_torch_cannot_copy_brings_its_bytes_back",
        f"{STATE}quantised.py::test_restore_of_a_quantised_tensor_is_exact_and_in_place",
        ZOO,
    ),
    "A5": (f"{STATE}distributed.py::test_fsdp2_uneven_and_empty_shards_round_trip", ZOO),
    "A7": ("tests/unit/test_field_cases.py::test_a7_own_int8_optimizer_state_continues_like_its_twin", ZOO),
    "B1": (
        f"{STATE}restore.py::test_image_holds_the_instant_of_capture",
        "tests/unit/test_replicate.py::test_state_that_changes_while_it_is_shipped_slowly_arrives_as_it_was_captured",
        "tests/unit/test_versions.py::test_course_with_the_version_missing_somewhere_skips_and_keeps_what_it_kept",
    ),
    "B2": (
        f"{STATE}naming.py::test_collect_of_a_reassigned_buffer_sees_the_new_one",
        f"{STATE}naming.py::test_collect_of_swapped_parameter_data_sees_the_new_data",
        f"{STATE}objects.py::test_restore_of_a_scheduler_continues_its_rates",
        "tests/unit/test_field_cases.py::test_b2_state_dict_hook_that_splits_a_weight_changes_nothing",
        ZOO,
    ),
    "B3": (KILLS, "tests/sim/test_versions_model.py::test_every_state_within_the_bounds_keeps_every_invariant"),
    "B4": (
        f"{STATE}distributed.py::test_fsdp2_parameters_that_are_gathered_now_are_captured_as_shards",
        f"{STATE}distributed.py::test_restore_while_fsdp2_parameters_are_gathered_reaches_the_next_forward",
        ZOO,
    ),
    "C1": (
        f"{STATE}optimizers.py::test_restore_before_the_first_step_removes_all_state",
        f"{STATE}optimizers.py::test_collect_after_backward_before_any_step_has_no_state_and_makes_none",
        f"{STATE}optimizers.py::test_restore_of_an_optimizer_continues_like_its_twin",
        FORMS,
    ),
    "C2": (
        f"{STATE}optimizers.py::test_restore_of_partly_stepped_and_frozen_parameters_keeps_exactly_their_entries",
        f"{STATE}naming.py::test_restore_brings_back_which_parameters_train_and_which_modules_evaluate",
        ZOO,
    ),
    "C3": (
        f"{STATE}optimizer_groups.py::test_restore_of_groups_keeps_keys_order_types_and_tensors",
        f"{STATE}optimizer_groups.py::test_restore_into_fewer_groups_adds_the_missing_ones",
        ZOO,
    ),
    "C4": (f"{STATE}optimizers.py::test_restore_of_an_optimizer_continues_like_its_twin",),
    "C6": (f"{STATE}naming.py::test_restore_of_tied_weights_keeps_the_tie", ZOO),
    "C7": (
        f"{STATE}naming.py::test_restore_into_another_wrapping_gives_the_same_state",
        f"{STATE}distributed.py::test_names_under_data_parallel_and_compile_are_those_of_the_model",
        f"{STATE}restore.py::test_restore_with_unmatched_tensors_names_them_and_writes_nothing",
    ),
    "C8": (
        f"{STATE}optimizers.py::test_capture_and_restore_fire_no_hook_and_take_no_step",
        f"{STATE}objects.py::test_restore_of_a_loss_scaler_keeps_scale_and_growth",
        FORMS,
    ),
    "C10": ("tests/unit/test_field_cases.py::test_c10_buffers_of_a_model_from_the_meta_device_are_filled",),
    "C13": (
        f"{STATE}restore.py::test_restore_into_another_model_names_the_difference_and_writes_nothing",
        f"{STATE}restore.py::test_restore_with_unmatched_tensors_names_them_and_writes_nothing",
        f"{STATE}objects.py::test_restore_of_extra_is_in_place_with_order_types_and_tensors",
    ),
    "C14": (
        "tests/unit/test_field_cases.py::test_c14_restore_under_a_memory_cap_is_in_place",
        f"{STATE}restore.py::test_restore_keeps_addresses_strides_and_aliases_of_the_model",
    ),
    "D1": (ZOO, KILLS),
    "D2": (
        f"{STATE}rng.py::test_restore_of_all_streams_repeats_the_draws",
        f"{STATE}rng.py::test_restore_of_cuda_streams_gives_the_current_device_that_of_the_current_one",
        f"{STATE}rng.py::test_restore_of_a_damaged_stream_is_an_error",
        f"{STATE}objects.py::test_restore_of_a_generator_object_continues_it_in_place",
    ),
}


def functions_of(path: str) -> set[str]:
    return {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("case", SHOWN_BY)
def test_case_is_shown_by_tests_that_exist(case: str) -> None:
    for test in SHOWN_BY[case]:
        path, name = test.split("::")
        assert name in functions_of(path), test


# -- A: copies


class Int8Momentum(torch.optim.Optimizer):
    """Keeps momentum as int8 codes and a scale per parameter; what it reads is not what it wrote."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                codes = torch.zeros(parameter.shape, dtype=torch.int8)
                state.update(momentum=Codes(codes, torch.ones(1)), note="fresh")
            kept = state["momentum"]
            value = kept.codes.float() * kept.scale * 0.9 + parameter.grad
            kept.scale.copy_(value.abs().max() / 127)
            kept.codes.copy_((value / kept.scale).round())
            state["note"] = f"scale {kept.scale.item():.2e}"
            parameter -= 0.1 * value


def int8_job() -> tuple[nn.Module, Int8Momentum, TrainingState]:
    torch.manual_seed(2)
    model = nn.Linear(5, 3)
    optimizer = Int8Momentum(model.parameters())
    return model, optimizer, TrainingState([model], [optimizer], {}, rng=False)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for number in range(count):
        optimizer.zero_grad()
        model(torch.full((2, 5), 0.1 * (number + 1))).square().sum().backward()
        optimizer.step()


def test_a7_own_int8_optimizer_state_continues_like_its_twin() -> None:
    model, optimizer, state = int8_job()
    steps(model, optimizer, 5)
    image = image_of(state)
    steps(model, optimizer, 5)
    end = image_of(state)
    model, optimizer, state = int8_job()
    steps(model, optimizer, 1)
    restore(state, image)
    assert_same(image_of(state), image)
    steps(model, optimizer, 5)
    assert_same(image_of(state), end)


# -- B: one moment


def test_b2_state_dict_hook_that_splits_a_weight_changes_nothing() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Parameter(torch.randn(6, 2))
            self.register_state_dict_post_hook(self.split)
            self.register_load_state_dict_pre_hook(self.join)

        @staticmethod
        def split(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
            for name, part in zip("qkv", state.pop(f"{prefix}qkv").chunk(3), strict=True):
                state[prefix + name] = part.clone()  # fresh tensors: what is saved once is stale ever after

        @staticmethod
        def join(_module: nn.Module, state: dict[str, Any], prefix: str, *_rest: Any) -> None:
            state[f"{prefix}qkv"] = torch.cat([state.pop(prefix + name) for name in "qkv"])

    model = nn.Sequential(Fused())
    state = TrainingState([model], [], {}, rng=False)
    with torch.no_grad():
        model[0].qkv += 1
    image = image_of(state)
    assert list(image.tensors) == ["model/0.qkv"]
    wanted = bits(model[0].qkv)
    with torch.no_grad():
        model[0].qkv.zero_()
    restore(state, image)
    assert bits(model[0].qkv) == wanted


# -- C: state


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(8.0).cos(), persistent=False)
        self.register_buffer("count", torch.tensor(3), persistent=True)


def test_c10_buffers_of_a_model_from_the_meta_device_are_filled() -> None:
    owner = Rotary()
    image = image_of(TrainingState([owner], [], {}, rng=False))
    with torch.device("meta"):
        empty = Rotary()
    replacement = empty.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*replacement.parameters(), replacement.table):
            tensor.fill_(float("nan"))
    state = TrainingState([replacement], [], {}, rng=False)
    restore(state, image)
    assert_same(image_of(state), image)
    assert torch.equal(replacement.table, owner.table)


MIB = 1 << 20


def restore_under_a_cap() -> tuple[bool, int]:
    """(whether no pointer changed, bytes of the state), with 8 MiB of private memory left for the restore."""
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(16)))  # 16 MiB
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        parameter.grad = None
    state = TrainingState([model], [optimizer], {}, rng=False)
    collected = state.collect()
    layout = Layout.build(collected.leaves)
    region = torch.frombuffer(shared_memory(layout.num_bytes), dtype=torch.uint8)
    layout.write(collected.leaves, region)
    pointers = [leaf.tensor.data_ptr() for leaf in collected.leaves]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    in_use = int(status["VmData"].split()[0]) << 10
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (in_use + 8 * MIB, before[1]))
    with pytest.raises(RuntimeError):
        torch.empty(layout.num_bytes, dtype=torch.uint8)  # a second copy does not fit
    state.restore(layout.read(region), collected.values)
    after = state.collect()
    resource.setrlimit(resource.RLIMIT_DATA, before)  # the comparison makes copies
    same = all(bits(leaf.tensor) == bits(layout.read(region)[leaf.name]) for leaf in after.leaves)
    return same and pointers == [leaf.tensor.data_ptr() for leaf in after.leaves], layout.num_bytes


def shared_memory(num_bytes: int) -> mmap.mmap:
    fd = os.memfd_create("slot")
    os.truncate(fd, num_bytes)
    return mmap.mmap(fd, num_bytes, mmap.MAP_SHARED)


def test_c14_restore_under_a_memory_cap_is_in_place() -> None:
    in_place, num_bytes = run_alone(restore_under_a_cap)
    assert in_place
    assert num_bytes >= 32 * MIB
