"""Optimizer state comes back entry by entry with its exact types, and neither side is stepped or cast for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_training import OPTIMIZERS, net, same, state_of, step
from state_zoo import Codes, assert_same, image_of, restore
from torch import nn

from p2pstate.state import LeafError, TrainingState


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("num_steps_lost", [0, 2])
def test_restore_of_an_optimizer_continues_like_its_twin(make: Any, num_steps_lost: int) -> None:
    model = net()
    optimizer = make(model.parameters())
    state = state_of(model, optimizer)
    step(model, optimizer, 3)
    image = image_of(state)
    step(model, optimizer, 3)
    end = image_of(state)

    model = net()
    optimizer = make(model.parameters())
    step(model, optimizer, num_steps_lost)
    state = state_of(model, optimizer)
    restore(state, image)
    assert_same(image_of(state), image)
    step(model, optimizer, 3)
    assert_same(image_of(state), end)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_restore_before_the_first_step_removes_all_state(make: Any) -> None:
    model = net()
    optimizer = make(model.parameters())
    fresh = {key for key, value in optimizer.state.items() if value}  # Adagrad makes its state at once
    state = state_of(model, optimizer)
    image = image_of(state)
    step(model, optimizer, 2)
    restore(state, image)
    assert {key for key, value in optimizer.state.items() if value} == fresh
    assert_same(image_of(state), image)


def test_collect_after_backward_before_any_step_has_no_state_and_makes_none() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    state = state_of(model, optimizer)
    model(torch.ones(1, 3)).sum().backward()
    assert not [name for name in image_of(state).tensors if name.startswith("optimizer/")]
    assert len(optimizer.state) == 0


def test_collect_of_an_empty_entry_differs_from_no_entry() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = state_of(model, optimizer)
    none = image_of(state)
    optimizer.state[model[0].weight] = {}
    empty = image_of(state)
    assert empty.values != none.values
    optimizer.state.clear()
    restore(state, empty)
    assert dict(optimizer.state) == {model[0].weight: {}}
    restore(state, none)
    assert len(optimizer.state) == 0


def test_restore_of_partly_stepped_and_frozen_parameters_keeps_exactly_their_entries() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    state = state_of(model, optimizer)
    model[0].bias.requires_grad_(False)
    step(model, optimizer)
    model[2].weight.requires_grad_(False)  # trained, then frozen: keeps its state
    model[2].weight.grad = None
    step(model, optimizer)
    image = image_of(state)
    holders = {"model/0.weight", "model/2.weight", "model/2.bias"}
    assert {name.split("/exp_avg")[0] for name in image.tensors if name.endswith("exp_avg")} == {
        f"optimizer/{name}" for name in holders
    }
    model[0].bias.requires_grad_(True)
    step(model, optimizer)
    restore(state, image)
    assert set(optimizer.state) == {model[0].weight, model[2].weight, model[2].bias}
    assert_same(image_of(state), image)


def zoo_entry() -> dict[Any, Any]:
    return {
        "step": torch.tensor(7.0),
        "exp_avg": torch.randn(4, 3, dtype=torch.float32),
        "codes": torch.randint(-128, 127, (5,), dtype=torch.int8),
        "stream": torch.randint(0, 255, (16,), dtype=torch.uint8),
        "fp8": torch.randn(3).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 5),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "name": "adam",
        "none": None,
        "flag": True,
        "count": 3,
        "mix": [1, "a", torch.ones(2), (None, torch.zeros(1, dtype=torch.bool))],
        "nested": {0: torch.full((2,), 2.0), "0": torch.full((2,), 3.0), 5: {"x": 1.5}},
        (1, 2): torch.tensor([4]),
    }


@pytest.mark.parametrize("present", ["nothing", "the same entry", "another entry"])
def test_restore_of_odd_state_keeps_types_dtypes_and_bits(present: str) -> None:
    torch.manual_seed(5)
    model = net(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[model[0].weight] = zoo_entry()
    optimizer.state["all"] = {"total": torch.tensor([1, 2]), "epoch": 4}  # type: ignore[index]
    wanted, wanted_all = zoo_entry(), {"total": torch.tensor([1, 2]), "epoch": 4}
    for key, value in optimizer.state[model[0].weight].items():
        wanted[key] = value
    state = state_of(model, optimizer)
    image = image_of(state)
    if present == "nothing":
        optimizer.state.clear()
    elif present == "another entry":
        odd = {"step": torch.tensor(7), "exp_avg": 3.0, "codes": torch.zeros(6, dtype=torch.int8), "mix": [], "more": 1}
        optimizer.state[model[0].weight] = odd
        optimizer.state[model[0].bias] = {"step": 1}
    restore(state, image)
    assert same(optimizer.state[model[0].weight], wanted)
    assert same(optimizer.state["all"], wanted_all)  # type: ignore[index]
    assert set(optimizer.state) == {model[0].weight, "all"}
    assert_same(image_of(state), image)


def test_restore_in_place_keeps_the_memory_of_matching_tensors() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False)
    state = state_of(model, optimizer)
    step(model, optimizer, 2)
    image = image_of(state)
    tensors = [*model.parameters(), *(t for entry in optimizer.state.values() for t in entry.values())]
    tensors.append(optimizer.param_groups[0]["lr"])
    places = [tensor.data_ptr() for tensor in tensors]
    step(model, optimizer, 2)
    restore(state, image)
    after = [*model.parameters(), *(t for entry in optimizer.state.values() for t in entry.values())]
    after.append(optimizer.param_groups[0]["lr"])
    assert all(one is other for one, other in zip(tensors, after, strict=True))
    assert [tensor.data_ptr() for tensor in after] == places


def test_restored_tensors_never_point_into_the_region() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = state_of(model, optimizer)
    step(model, optimizer, 2)
    image = image_of(state)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = state_of(model, optimizer)
    restore(state, image)
    before = image_of(state)
    image.region.fill_(0x55)
    assert_same(image_of(state), before)


def test_restored_state_has_the_strides_of_its_parameter() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = make()
    model(torch.ones(1, 3, 4, 4)).sum().backward()
    optimizer.step()
    strides = optimizer.state[model.weight]["exp_avg"].stride()
    assert strides == model.weight.stride() != torch.empty(4, 3, 3, 3).stride()
    image = image_of(state_of(model, optimizer))
    model, optimizer = make()
    restore(state_of(model, optimizer), image)
    assert optimizer.state[model.weight]["exp_avg"].stride() == strides


def test_capture_of_a_parameter_in_no_model_is_refused() -> None:
    model = net()
    stray = nn.Parameter(torch.zeros(3))
    with pytest.raises(LeafError, match=r"shape \[3\] that is in none of the given models") as caught:
        state_of(model, torch.optim.SGD([model[0].weight, stray], lr=0.1))
    assert caught.value.name == "optimizer group 0"


def test_capture_of_state_with_an_odd_key_is_refused() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[1.5] = {}  # type: ignore[index]
    with pytest.raises(LeafError, match=r"key 1\.5"):
        state_of(model, optimizer)


def test_several_optimizers_keep_their_state_apart() -> None:
    model = net()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    second = torch.optim.AdamW(model[2].parameters(), lr=0.2)
    state = state_of(model, first, second)
    step(model, first)
    second.step()
    image = image_of(state)
    assert "optimizer0/model/0.weight/momentum_buffer" in image.tensors
    assert "optimizer1/model/2.bias/exp_avg" in image.tensors
    second.state.clear()
    first.param_groups[0]["lr"] = 5.0
    restore(state, image)
    assert_same(image_of(state), image)


def replaced(entry: dict[str, Any]) -> None:
    entry["exp_avg"] = torch.full((4, 3), 2.0)


def data_swapped(entry: dict[str, Any]) -> None:
    entry["exp_avg"].data = torch.full((4, 3), 2.0)


def renamed(entry: dict[str, Any]) -> None:
    entry["other"] = entry.pop("exp_avg_sq").fill_(2)


def removed(entry: dict[str, Any]) -> None:
    del entry["exp_avg_sq"]


@pytest.mark.parametrize("change", [replaced, data_swapped, renamed, removed])
def test_collect_after_state_tensors_changed_sees_the_new_ones(change: Callable[[dict[str, Any]], None]) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    state = state_of(model, optimizer)
    step(model, optimizer)
    state.collect()
    entry = optimizer.state[model[0].weight]
    change(entry)
    collected = state.collect()
    tensors = image_of(state).tensors
    mine = {name.rsplit("/", 1)[1]: tensor for name, tensor in tensors.items() if "/model/0.weight/" in name}
    assert sorted(mine) == sorted(entry)
    assert all(torch.equal(mine[key], entry[key]) for key in entry)
    assert state.collect().values == collected.values
    fresh = TrainingState([model], [optimizer], {}, rng=False)
    assert_same(image_of(fresh), image_of(state))


def test_capture_and_restore_fire_no_hook_and_take_no_step() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    fired: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: fired.append("step pre"))
    optimizer.register_step_post_hook(lambda *_: fired.append("step post"))
    optimizer.register_state_dict_pre_hook(lambda *_: fired.append("state_dict pre"))
    optimizer.register_state_dict_post_hook(lambda *_: fired.append("state_dict post"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: fired.append("load pre"))
    optimizer.register_load_state_dict_post_hook(lambda *_: fired.append("load post"))
    model._register_state_dict_hook(lambda *_: fired.append("module state_dict"))
    model.register_forward_hook(lambda *_: fired.append("forward"))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: fired.append("grad"))
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    state = state_of(model, optimizer)
    image = image_of(state)
    restore(state, image)
    assert fired == []
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in model.parameters())


def test_restore_of_a_subclass_state_writes_into_the_live_one_or_makes_it() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    codes = Codes(torch.ones(2, dtype=torch.int8), torch.ones(1))
    optimizer.state[model[0].weight] = {"moment": codes}
    state = state_of(model, optimizer)
    image = image_of(state)
    codes.codes.zero_()
    restore(state, image)
    assert codes.codes.tolist() == [1, 1]
    optimizer.state.clear()
    restore(state, image)
    assert_same(image_of(state), image)


def test_restore_of_a_subclass_whose_name_several_classes_have_is_refused() -> None:
    def one_of_two() -> type[Codes]:
        class Ambiguous(Codes):
            @staticmethod
            def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Any:
                return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.bfloat16)

        return Ambiguous

    kinds = one_of_two(), one_of_two()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model[0].weight] = {"moment": kinds[0](torch.ones(2, dtype=torch.int8), torch.ones(1))}
    state = state_of(model, optimizer)
    image = image_of(state)
    optimizer.state.clear()
    with pytest.raises(LeafError, match="Ambiguous") as caught:
        restore(state, image)
    assert caught.value.name == "optimizer/model/0.weight/moment"


def test_restore_makes_state_of_a_subclass_that_the_state_of_another_parameter_has() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index, parameter in enumerate(model.parameters()):
        codes = torch.full(parameter.shape, index - 2, dtype=torch.int8)
        optimizer.state[parameter]["codes"] = Codes(codes, torch.full((1,), 0.5 + index))
    image = image_of(state_of(model, optimizer))
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model[0].weight]["codes"] = Codes(torch.zeros(4, 3, dtype=torch.int8), torch.ones(1))
    state = state_of(model, optimizer)
    restore(state, image)
    assert_same(image_of(state), image)
    made = optimizer.state[model[2].bias]["codes"]
    assert type(made) is Codes
    assert (made.dtype, made.codes.tolist(), made.scale.item()) == (torch.bfloat16, [1, 1], 3.5)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("form", ["uint4", "qint8"])
def test_capture_of_state_in_an_odd_form_has_its_newest_value(form: str, in_place: bool) -> None:
    def value(number: int) -> torch.Tensor:
        if form == "qint8":
            return torch.quantize_per_tensor(torch.ones(3), 1.0 / number, 0, torch.qint8)
        return torch.full((3,), number, dtype=torch.uint8).view(torch.uint4)

    def is_value(tensor: torch.Tensor, number: int) -> bool:
        if form == "qint8":
            return tensor.dtype is torch.qint8 and tensor.q_scale() == 1.0 / number
        return tensor.dtype is torch.uint4 and tensor.view(torch.uint8).tolist() == [number] * 3

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model[0].bias] = {"odd": value(1)}
    state = state_of(model, optimizer)
    if in_place:
        live = optimizer.state[model[0].bias]["odd"]
        live.copy_(value(2)) if form == "qint8" else live.view(torch.uint8).fill_(2)
    else:
        optimizer.state[model[0].bias]["odd"] = value(2)
    image = image_of(state)
    restore(state, image)
    assert is_value(optimizer.state[model[0].bias]["odd"], 2)
    optimizer.state.clear()
    restore(state, image)
    assert is_value(optimizer.state[model[0].bias]["odd"], 2)


@pytest.mark.parametrize("with_gradient", ["none", "some", "all"])
def test_what_is_stepped_on_zeros_is_so_after_a_restore(with_gradient: str) -> None:
    def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer, TrainingState]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        return model, optimizer, state_of(model, optimizer)

    model, optimizer, state = trained()
    used = {"none": model[0:0], "some": model[0], "all": model}[with_gradient]
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        if with_gradient != "none":
            used(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    image = image_of(state)  # with gradients from the step before, that the next one begins with putting to zero

    newcomer, its_optimizer, its_state = trained()
    restore(its_state, image)
    assert_same(image_of(its_state), image)
    for each in (optimizer, its_optimizer):
        each.zero_grad(set_to_none=False)
        each.step()
    assert_same(image_of(its_state), image_of(state))
    assert [p.grad is None for p in newcomer.parameters()] == [p.grad is None for p in model.parameters()]


def test_gradients_of_an_optimizer_that_was_not_stepped_are_state_and_those_of_others_are_not() -> None:
    model = net()
    one, other = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[2].parameters(), lr=0.1)
    state = state_of(model, one, other)
    model(torch.ones(2, 3)).sum().backward()
    assert not any(":gradients" in name for name in image_of(state).tensors)
    state.stepped({one})
    image = image_of(state)
    found = {name: tensor for name, tensor in image.tensors.items() if ":gradients" in name}
    assert sorted(found) == [f"optimizer1/:gradients/model~12.{name}" for name in ("bias", "weight")]
    wanted = model[2].weight.grad.clone()

    newcomer = net()
    optimizers = [torch.optim.SGD(newcomer[index].parameters(), lr=0.1) for index in (0, 2)]
    state = state_of(newcomer, *optimizers)
    restore(state, image)
    assert not newcomer[0].weight.grad.any()
    assert torch.equal(newcomer[2].weight.grad, wanted)
    assert_same(image_of(state), image)  # captured again before the next step, it still is state
    state.stepped(optimizers)
    assert not any(":gradients" in name for name in image_of(state).tensors)


def test_entries_under_whole_numbers_come_back_and_those_under_other_keys_are_refused() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[0]["norm"] = torch.tensor(2.0)
    optimizer.state[-3]["num"] = 4
    optimizer.state["0"]["num"] = 5
    image = image_of(state_of(model, optimizer))
    other = net()
    newcomer = torch.optim.SGD(other.parameters(), lr=0.1)
    restore(state_of(other, newcomer), image)
    assert newcomer.state == {0: {"norm": torch.tensor(2.0)}, -3: {"num": 4}, "0": {"num": 5}}
    newcomer.state[2.5]["num"] = 1
    with pytest.raises(LeafError, match=r"2\.5; use parameters, strings or whole numbers as keys"):
        state_of(other, newcomer)
