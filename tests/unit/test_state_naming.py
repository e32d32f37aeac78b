"""Names come from the model alone; tensors are looked up anew; what cannot be captured is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from state_zoo import Codes, assert_same, image_of, restore
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

from p2pstate.state import LeafError, TrainingState, decode


def state_of(*models: nn.Module, **objects: Any) -> TrainingState:
    return TrainingState(models, [], objects, rng=False)


def names(*models: nn.Module) -> list[str]:
    return [leaf.name for leaf in state_of(*models).collect().leaves]


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


NET_NAMES = [
    "model/0.bias",
    "model/0.weight",
    "model/1.bias",
    "model/1.num_batches_tracked",
    "model/1.running_mean",
    "model/1.running_var",
    "model/1.weight",
]


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


def inner_wrapped() -> nn.Module:
    model = net()
    model[0] = checkpoint_wrapper(compiled(model[0]))
    model[1] = compiled(checkpoint_wrapper(model[1]))
    return model


WRAPPED = {
    "plain": net,
    "compiled": lambda: compiled(net()),
    "checkpointed": lambda: checkpoint_wrapper(net()),
    "checkpointed compiled": lambda: checkpoint_wrapper(compiled(net())),
    "compiled checkpointed": lambda: compiled(checkpoint_wrapper(net())),
    "data parallel": lambda: nn.DataParallel(net()),
    "parts": inner_wrapped,
    "compiled in place": lambda: (model := net(), model.compile(backend="eager"))[0],
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_names_of_a_wrapped_model_are_those_of_the_model(wrap: Any) -> None:
    assert names(wrap()) == NET_NAMES


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_restore_into_another_wrapping_gives_the_same_state(wrap: Any) -> None:
    owner = state_of(WRAPPED["checkpointed compiled"]())
    image = image_of(owner)
    model = wrap()
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(7)
    replacement = state_of(model)
    restore(replacement, image)
    assert_same(image_of(replacement), image)


def test_names_of_children_called_like_wrappers_stay() -> None:
    model = nn.Module()
    model.module = nn.Linear(1, 1, bias=False)
    model._orig_mod = nn.Linear(1, 1, bias=False)
    assert names(model) == ["model/_orig_mod.weight", "model/module.weight"]


def test_names_of_several_models_are_numbered() -> None:
    assert names(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)) == ["model0/weight", "model1/weight"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        self.head.register_buffer("table", self.table)
        self.again = self.head


def test_names_of_tied_tensors_and_modules_are_the_first_once() -> None:
    assert names(Tied()) == ["model/embedding.weight", "model/table"]


def test_restore_of_tied_weights_keeps_the_tie() -> None:
    model = Tied()
    state = state_of(model)
    image = image_of(state)
    with torch.no_grad():
        model.head.weight.zero_()
        model.table.fill_(9)
    restore(state, image)
    assert model.head.weight is model.embedding.weight
    assert model.head.table is model.table
    assert_same(image_of(state), image)


def test_collect_of_a_reassigned_buffer_sees_the_new_one() -> None:
    model = nn.BatchNorm1d(2)
    state = state_of(model)
    model.running_mean = model.running_mean + 5
    assert image_of(state).tensors["model/running_mean"].tolist() == [5, 5]


def test_collect_of_swapped_parameter_data_sees_the_new_data() -> None:
    model = nn.Linear(2, 1, bias=False)
    state = state_of(model)
    model.weight.data = torch.tensor([[3.0, 4.0]])
    assert image_of(state).tensors["model/weight"].tolist() == [[3, 4]]


def test_collect_of_a_grown_model_sees_the_new_parts() -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    state = state_of(model)
    model.append(nn.Linear(1, 1, bias=False))
    model[0].register_buffer("late", torch.ones(1), persistent=False)
    model[0].register_parameter("none", None)
    assert [leaf.name for leaf in state.collect().leaves] == ["model/0.late", "model/0.weight", "model/1.weight"]
    model[1] = nn.Linear(1, 2, bias=True)
    assert "model/1.bias" in [leaf.name for leaf in state.collect().leaves]


def test_collect_aliases_live_memory_and_detaches() -> None:
    model = nn.Linear(2, 1)
    leaves = {leaf.name: leaf.tensor for leaf in state_of(model).collect().leaves}
    assert leaves["model/weight"].data_ptr() == model.weight.data_ptr()
    assert not leaves["model/weight"].requires_grad
    assert type(leaves["model/weight"]) is torch.Tensor


class Growing(nn.Module):
    """Keeps a history and a tensor as extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.history: list[int] = []

    def get_extra_state(self) -> dict[str, Any]:
        return {"history": self.history, "sum": torch.tensor(float(sum(self.history)))}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.history = state["history"]
        assert state["sum"].item() == sum(self.history)


def test_restore_of_growing_extra_state_brings_it_back() -> None:
    model = nn.Sequential(Growing(), Growing())
    state = state_of(model)
    model[0].history += [1, 2, 3]
    image = image_of(state)
    assert image.tensors["model/0._extra_state/sum"].item() == 6
    model[0].history.append(4)
    model[1].history.append(5)
    restore(state, image)
    assert (model[0].history, model[1].history) == ([1, 2, 3], [])
    assert_same(image_of(state), image)


def test_restore_of_an_average_model_given_as_an_object_is_in_place() -> None:
    model = net()
    average = AveragedModel(model)
    state = state_of(model, ema=average)
    average.update_parameters(model)
    image = image_of(state)
    assert "ema/n_averaged" in image.tensors
    assert "ema/module.0.weight" in image.tensors
    place = average.module[0].weight.data_ptr()
    with torch.no_grad():
        model[0].weight.fill_(1)
    average.update_parameters(model)
    restore(state, image)
    assert average.module[0].weight.data_ptr() == place
    assert_same(image_of(state), image)


def test_collect_of_a_flattenable_subclass_gives_its_inner_tensors() -> None:
    model = nn.Module()
    codes, scale = torch.randint(-128, 127, (3, 4), dtype=torch.int8), torch.rand(3)
    model.weight = nn.Parameter(Codes(codes.clone(), scale.clone()), requires_grad=False)
    state = state_of(model)
    image = image_of(state)
    assert sorted(image.tensors) == ["model/weight/codes", "model/weight/scale"]
    assert torch.equal(image.tensors["model/weight/codes"], codes)
    model.weight.codes.zero_()
    model.weight.scale.zero_()
    restore(state, image)
    assert torch.equal(model.weight.codes, codes)
    assert torch.equal(model.weight.scale, scale)


class Opaque(torch.Tensor):
    pass


def holding(buffer: torch.Tensor) -> nn.Module:
    model = nn.Module()
    model.register_buffer("odd", buffer)
    return model


def four_bits() -> torch.Tensor:
    return torch.quantize_per_channel(torch.zeros(2, 2), torch.ones(2), torch.zeros(2), 0, torch.quint4x2)


@pytest.mark.parametrize(
    ("model", "name", "what"),
    [
        (lambda: holding(torch.zeros(2).as_subclass(Opaque)), "model/odd", "Opaque"),
        (lambda: holding(torch.zeros(2).to_sparse()), "model/odd", "sparse"),
        (lambda: holding(four_bits()), "model/odd", "quantised to torch.quint4x2"),
        (lambda: nn.Linear(1, 1, bias=False, device="meta"), "model/weight", "meta"),
        (lambda: nn.LazyLinear(2, bias=False), "model/weight", "no shape yet"),
        (lambda: holding(torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)])), "model/odd", "nested"),
        (lambda: holding(torch.zeros(6).unfold(0, 3, 1)), "model/odd", "share memory"),
        (lambda: holding(torch.zeros(9).as_strided((2, 3), (2, 1))), "model/odd", "share memory"),
        (lambda: holding(torch.zeros(1 << 21).unfold(0, 2, 1)), "model/odd", "share memory"),
    ],
    ids=["opaque subclass", "sparse", "quantised", "meta", "lazy", "nested", "unfolded", "as strided", "long unfolded"],
)
@pytest.mark.filterwarnings("ignore")
def test_capture_of_an_impossible_tensor_is_refused_by_name(model: Any, name: str, what: str) -> None:
    with pytest.raises(LeafError, match=what) as caught:
        state_of(model())
    assert caught.value.name == name
    assert caught.value.advice


@pytest.mark.parametrize(
    "view",
    [
        lambda base: base.view(6, 6)[:, 2],
        lambda base: base.view(6, 6).t(),
        lambda base: base.view(1, 3, 3, 4).to(memory_format=torch.channels_last),
        lambda base: base[:6].expand(4, 6),
        lambda base: base.as_strided((2, 3), (3, 2)),  # interleaved: 0 2 4, 3 5 7
        lambda base: base.view(6, 6)[::2, ::3],
    ],
    ids=["column", "transposed", "channels last", "expanded", "interleaved", "every other"],
)
def test_restore_of_any_view_without_overlap_writes_its_elements_only(view: Any) -> None:
    base = torch.arange(36.0)
    model = holding(view(base))
    state = state_of(model)
    image = image_of(state)
    storage = model.odd.untyped_storage()
    before = model.odd.clone()
    with torch.no_grad():
        torch.empty(0).set_(storage).add_(100)
    outside = torch.empty(0).set_(storage).clone()
    restore(state, image)
    assert torch.equal(model.odd, before)
    changed = torch.empty(0).set_(storage) != outside
    assert int(changed.sum()) == len(set(before.flatten().tolist()))


@pytest.mark.parametrize("name", ["int4", "uint4", "uint1", "int7"])
def test_restore_of_a_dtype_that_torch_cannot_copy_brings_its_bytes_back(name: str) -> None:
    codes = torch.arange(12, dtype=torch.uint8).view(3, 4)
    model = holding(codes.view(getattr(torch, name)))
    state = state_of(model)
    image = image_of(state)
    assert list(image.tensors) == [f"model/odd/{name}"]
    codes.zero_()
    restore(state, image)
    assert codes.flatten().tolist() == list(range(12))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [torch.jit.script, lambda model: torch.jit.trace(model, torch.ones(2, 3))])
def test_restore_of_a_scripted_model_is_in_place(make: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    scripted = make(model)
    state, plain = state_of(scripted), state_of(model)
    assert [leaf.name for leaf in state.collect().leaves] == [leaf.name for leaf in plain.collect().leaves]
    image = image_of(state)
    before = model[1].running_mean.clone()
    scripted(torch.rand(4, 3))
    assert not torch.equal(model[1].running_mean, before)
    restore(state, image)
    assert torch.equal(model[1].running_mean, before)


def test_restore_brings_back_which_parameters_train_and_which_modules_evaluate() -> None:
    model = nn.Sequential(net(), nn.Dropout())
    state = state_of(model)
    model[0][0].weight.requires_grad_(False)
    model[0][1].eval()
    image = image_of(state)
    other = nn.Sequential(compiled(net()), nn.Dropout()).train()
    other[1].eval()
    state = state_of(other)
    restore(state, image)
    assert_same(image_of(state), image)
    inner = other[0]._orig_mod
    assert [p.requires_grad for p in inner.parameters()] == [False, True, True, True]
    assert [module.training for module in (other, inner, inner[0], inner[1], other[1])] == [
        True,
        True,
        True,
        False,
        True,
    ]


def test_collect_of_a_shared_module_asks_for_its_extra_state_once() -> None:
    shared = Growing()
    model = nn.Sequential(shared, nn.Sequential(shared))
    state = state_of(model)
    assert sorted(image_of(state).tensors) == ["model/0._extra_state/sum", "model/0.weight"]


class BadExtra(nn.Module):
    def get_extra_state(self) -> Any:
        return {"f": [len]}


def test_capture_of_extra_state_that_is_not_plain_is_refused_by_path() -> None:
    with pytest.raises(LeafError) as caught:
        state_of(nn.Sequential(BadExtra()))
    assert caught.value.name == "model/0._extra_state/f/0"


def test_name_that_is_no_unicode_is_refused_and_any_other_kept() -> None:
    model = nn.Module()
    odd = ["ü ☃", "a/b", "a\nb", "x" * 70_000, "~", "-", "%s", "\\ud800"]
    for number, name in enumerate(odd):
        model.register_buffer(name, torch.full((2,), number))
    state = state_of(model)
    assert sorted(names(model)) == sorted(f"model/{name}" for name in odd)
    image = image_of(state)
    model.register_buffer("half \ud800", torch.ones(1))
    with pytest.raises(LeafError, match=r"model/half \\ud800.*rename it"):
        state_of(model)
    del model._buffers["half \ud800"]
    for buffer in model.buffers():
        buffer.zero_()
    restore(state_of(model), image)
    assert [int(buffer[0]) for buffer in model.buffers()] == list(range(len(odd)))


def test_buffers_that_the_state_dict_leaves_out_are_told_by_all_their_names() -> None:
    model = net()
    table = torch.ones(3)
    for module in model:
        module.register_buffer("table", table, persistent=False)
    values = decode(state_of(compiled(model)).collect().values)
    assert values["non_persistent"] == ["model/0.table", "model/1.table"]
    assert "model/0.table" in names(model), "and captured all the same"
