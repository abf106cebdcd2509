"""A sharded module compared with the plain one: inputs and outputs, modes and functions of torch, what it shows.

As test_training.py: losses, gradients and parameters have the bits of the plain program.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import tessera
import torch
from support import (
    CUTS,
    MLP_UNITS,
    Block,
    Mlp,
    Plain,
    Tower,
    Unitwise,
    assert_bits,
    assert_same_gradients,
    assert_steps_as_plain,
    drawn,
    mse,
    shard_layers,
)
from tessera import MixedPrecisionPolicy, Rule, fully_shard
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

BFLOAT16 = torch.bfloat16


# --- what goes in and comes out ---


@dataclasses.dataclass
class Hidden:
    """What a Sorter returns."""

    first: Tensor
    rest: list[Tensor]
    nothing: None = None
    note: str = "kept"


class Sorter(nn.Module):
    """Takes tensors in containers and gives some back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(
        self, batch: dict[str, Any], pair: tuple[Tensor, list[Tensor]], *, scale: Tensor | None = None, mode: str = "no"
    ) -> Hidden:
        """Tensors of [rows, 8]; `batch["ids"]` is [rows] of whole numbers."""
        assert mode == "yes" and batch["none"] is None and batch["ids"].dtype == torch.int64
        y = self.linear(batch["x"]) + self.linear(pair[0]) * pair[1][0]
        if scale is not None:
            y = y * scale
        return Hidden(y, [y.tanh(), batch["x"] * batch["ids"][:, None]])


class Office(nn.Module):
    """Calls a Sorter, and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.inside = nn.Linear(8, 8)
        self.sorter = Sorter()

    def forward(self, *, batch: dict[str, Any]) -> dict[str, Any]:
        """`batch` as Sorter's, without "none"."""
        h = self.inside(batch["x"])
        hidden = self.sorter({**batch, "x": h, "none": None}, (h * 2, [h + 1]), scale=h.sigmoid(), mode="yes")
        assert hidden.note == "kept" and hidden.nothing is None
        return {"sum": hidden.first + hidden.rest[0], "more": (hidden.rest[1], [None, "text", 3])}


@pytest.mark.parametrize("units", [(), ("sorter",), ("inside", "sorter")])
def test_containers_keywords_and_none_pass_a_unit_with_the_plain_gradients(world: Any, units: tuple[str, ...]) -> None:
    """dict, tuple, list, keyword, None, str and a dataclass as arguments and results."""
    model = Office()
    plain = Plain(model, world.size)
    shard_layers(model, units)

    def loss_of(one: Any, rank: int, step: int) -> Tensor:
        x = drawn(1, step, rank, shape=(4, 8)).requires_grad_()
        out = one(batch={"x": x, "ids": torch.arange(4)})
        assert out["more"][1] == [None, "text", 3]
        return (out["sum"] * out["more"][0]).square().mean()

    assert_steps_as_plain(world, model, plain, loss_of)


def test_a_model_output_of_transformers_passes_a_unit(world: Any) -> None:
    """ModelOutput stays one, with its tensors' gradients."""
    outputs = pytest.importorskip("transformers.modeling_outputs")

    class WithOutput(Tower):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            return outputs.BaseModelOutput(last_hidden_state=super().forward(x), hidden_states=(x, x * self.scale))

    model = WithOutput()
    plain = Plain(model, world.size)
    shard_layers(model, CUTS["blocks"])

    def loss_of(one: Any, rank: int, step: int) -> Tensor:
        out = one(drawn(1, step, rank, shape=(4, 8)).requires_grad_())
        assert isinstance(out, outputs.BaseModelOutput) and out.attentions is None
        return (out.last_hidden_state * out["hidden_states"][1]).mean()

    assert_steps_as_plain(world, model, plain, loss_of)


class Remembering(nn.Module):
    """Writes into what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, seen: list[Any], named: dict[str, Any]) -> Tensor:
        """Appends to `seen` and sets `named["mean"]`."""
        y = self.linear(x)
        seen.append(y.detach().clone())
        named["mean"] = y.detach().mean().item()
        return y


class Asking(nn.Module):
    """Calls a Remembering, and looks at what it left."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.inside = Remembering()

    def forward(self, x: Tensor, seen: list[Any], named: dict[str, Any]) -> Tensor:
        """Twice the same layer."""
        before = len(seen)
        y = self.inside(self.inside(x, seen, named), seen, named=named)
        assert len(seen) == before + 2
        return y


@pytest.mark.parametrize("units", [(), ("inside",)])
def test_a_module_that_writes_into_its_arguments_is_seen_by_the_caller(world: Any, units: tuple[str, ...]) -> None:
    """Lists and dicts reach the module as the same objects, tensors inside them or not."""
    model = Asking()
    plain = Plain(model, world.size)
    shard_layers(model, units)

    def loss_of(one: Any, rank: int, step: int) -> Tensor:
        seen: list[Any] = [torch.ones(2), "first"]
        named: dict[str, Any] = {"other": torch.zeros(1)}
        x = drawn(1, step, rank, shape=(4, 8)).requires_grad_()
        y = one(x, seen, named=named)
        assert len(seen) == 4 and seen[1] == "first" and list(named) == ["other", "mean"]
        assert_bits("what was appended", seen[3], y.detach())
        assert named["mean"] == y.mean().item()
        return y.square().mean()

    assert_steps_as_plain(world, model, plain, loss_of)


class InPlace(nn.Module):
    """Changes the results of its layers in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 8] to [rows, 8]."""
        y = self.first(x)
        y += x
        y = torch.relu_(y)
        z = self.second(y)
        z[:, 0] = 0
        z.mul_(2)
        return z


@pytest.mark.parametrize("units", [(), ("first",), ("first", "second")])
def test_results_of_units_may_be_changed_in_place(world: Any, units: tuple[str, ...]) -> None:
    """`y = layer(x); y += x; relu_(y)` has the plain gradients; a result that has no other holder is the caller's."""
    model = InPlace()
    plain = Plain(model, world.size)
    shard_layers(model, units)

    def loss_of(one: Any, rank: int, step: int) -> Tensor:
        y = one(drawn(1, step, rank, shape=(4, 8)))
        y += 1
        return y.square().mean()

    assert_steps_as_plain(world, model, plain, loss_of)


def test_several_forwards_before_one_backward_and_unused_results(world: Any) -> None:
    """Two forwards of the model, the first one's loss used, a third forward's result dropped."""
    model = Tower()
    plain = Plain(model, world.size)
    shard_layers(model, CUTS["nested"])

    def loss_of(one: Any, rank: int, step: int) -> Tensor:
        first, second = mse(one, rank, 3 * step), mse(one, rank, 3 * step + 1)
        mse(one, rank, 3 * step + 2)
        return first * second

    assert_steps_as_plain(world, model, plain, loss_of)


class Branching(Tower):
    """Uses its second block on one rank only."""

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        """[rows, 8] to [rows, 8]."""
        x = self.blocks[0](x)
        y = self.blocks[1](x)
        return (x + y if both else x) * self.scale


def test_a_unit_whose_result_one_rank_does_not_use_has_zeros_from_it(world: Any) -> None:
    """The other rank's gradient is divided by the number of ranks all the same."""
    model = Branching()
    unitwise = Unitwise(model, world.size, units=(*CUTS["blocks"], ""))
    shard_layers(model, CUTS["blocks"])

    def loss_of(one: Any, rank: int) -> Tensor:
        return one(drawn(1, rank, shape=(4, 8)), both=rank == 0).square().mean()

    loss_of(model, world.rank).backward()
    unitwise.backward(loss_of)
    unitwise.reduce()
    assert_same_gradients(model, unitwise)


class Recording(Mlp):
    """An Mlp that notes the dtypes of what its layers return."""

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns [..., width]."""
        self.seen: list[torch.dtype] = []
        for layer in self.layers:
            x = layer(x)
            self.seen.append(x.dtype)
            x = torch.tanh(x)
        return x


def test_a_pinned_unit_takes_its_inputs_uncast_and_output_dtype_casts_its_results(world: Any) -> None:
    """A float32 layer before bfloat16 ones: its float32 input is not rounded, its results continue in bfloat16."""
    model = Recording()
    wide = Unitwise(
        model,
        world.size,
        units=(*MLP_UNITS, ""),
        compute=lambda name: torch.float32 if name.startswith("layers.0") else BFLOAT16,
        cast=lambda unit: BFLOAT16 if unit in MLP_UNITS[1:] else None,
        output=lambda unit: {"layers.0": BFLOAT16, "layers.2": torch.float64}.get(unit),
    )
    policy = MixedPrecisionPolicy(param_dtype=BFLOAT16)
    pins = [Rule(["weight", "bias"], pin=True)]
    fully_shard(model.layers[0], mp_policy=dataclasses.replace(policy, output_dtype=BFLOAT16, rules=pins))
    fully_shard(model.layers[1], mp_policy=policy)
    fully_shard(model.layers[2], mp_policy=dataclasses.replace(policy, output_dtype=torch.float64))
    fully_shard(model)
    loss = mse(model, world.rank)
    loss.backward()
    assert_bits("loss", loss, wide.backward(mse)[world.rank])
    wide.reduce()
    assert_same_gradients(model, wide)
    assert model.seen == [BFLOAT16, BFLOAT16, torch.float64]


def test_inputs_that_require_grad_have_the_plain_gradient(world: Any) -> None:
    """Of the model, through units, in the caller's dtype."""
    model = Tower()
    plain = Plain(model, world.size)
    shard_layers(model, CUTS["nested"])
    x = drawn(1, world.rank, shape=(4, 8)).requires_grad_()
    y = x.detach().clone().requires_grad_()
    model(x).square().sum().backward()
    plain.copies[world.rank](y).square().sum().backward()
    assert x.grad is not None and y.grad is not None
    assert_bits("the input's gradient", x.grad, y.grad)


# --- modes, functions, other torch features ---


def test_functional_call_without_tensors_is_a_call(world: Any) -> None:
    """torch.func.functional_call(model, {}, x)."""
    model = Tower()
    plain = Plain(model, world.size)
    shard_layers(model, CUTS["blocks"])

    def loss_of(one: Any, rank: int, step: int) -> Tensor:
        return torch.func.functional_call(one, {}, (drawn(1, step, rank, shape=(4, 8)),)).square().mean()

    assert_steps_as_plain(world, model, plain, loss_of)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_without_gradients_gives_the_same_bits_and_leaves_training_alone(world: Any, mode: Any) -> None:
    """Between steps, and between a forward and its backward."""
    model = Tower()
    plain = Plain(model, world.size)
    shard_layers(model, CUTS["nested"])
    x = drawn(4, shape=(3, 8))

    def loss_of(one: Any, rank: int, step: int) -> Tensor:
        loss = mse(one, rank, step)
        with mode():
            result = one(x)
        assert not result.requires_grad
        assert_bits("the evaluation", result, plain.copies[0](x).detach())
        return loss

    assert_steps_as_plain(world, model, plain, loss_of)


class Numbers(Dataset[Tensor]):
    """Rows that are a function of their index."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return drawn(5, index, shape=(8,))


def test_data_loaders_with_forked_workers_feed_a_sharded_model(world: Any) -> None:
    """Workers are forked while the World is up, and end without ending it."""
    model = Tower()
    plain = Plain(model, world.size)
    shard_layers(model, CUTS["blocks"])
    for x in DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context="fork"):

        def loss_of(one: Any, rank: int, batch: Tensor = x) -> Tensor:
            return one(batch + rank).square().mean()

        loss_of(model, world.rank).backward()
        plain.backward(loss_of)
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()
    assert not world.closed


def test_hooks_on_units_see_what_crosses_its_border(world: Any) -> None:
    """Forward hooks may replace arguments and results; full backward hooks see and replace gradients."""
    model = Tower()
    calls: list[str] = []

    def before(_module: nn.Module, arguments: Any) -> Any:
        calls.append("before")
        return (arguments[0] * 2,)

    def after(_module: nn.Module, _arguments: Any, result: Tensor) -> Tensor:
        calls.append("after")
        return result * 3

    def backward(_module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        calls.append("backward")
        return tuple(None if one is None else one * 0.5 for one in grad_input)

    def hook(one: Any) -> None:
        for block in one.blocks:
            block.register_forward_pre_hook(before)
            block.register_forward_hook(after)
            block.register_full_backward_hook(backward)

    plain = Plain(model, world.size)
    for one in plain.copies:
        hook(one)
    shard_layers(model, CUTS["blocks"])
    hook(model)
    assert_steps_as_plain(world, model, plain, mse, steps=1)
    ours = len(calls) // (world.size + 1)
    assert calls[:ours] == ["before", "after"] * 2 + ["backward"] * 2


def test_a_hook_of_a_unit_reads_its_whole_parameters(world: Any) -> None:
    """Hooks are part of the call: inside of it weights have values, afterwards they have none, and say so."""
    model = Tower()
    plain = Plain(model, world.size)
    shard_layers(model, CUTS["blocks"])
    seen: list[Tensor] = []
    model.blocks[0].register_forward_hook(lambda module, _a, _r: seen.append(module.first.weight.detach().clone()))
    with torch.no_grad():
        model(drawn(4, shape=(3, 8)))
    assert_bits("the weight", seen[0], plain.copies[0].blocks[0].first.weight.detach())
    if world.size > 1:  # one rank has no other to gather from, and keeps its values where they are
        with pytest.raises(RuntimeError, match="blocks.0"):
            model.blocks[0].first.weight.sum()


# --- what a module shows ---


def test_a_sharded_module_keeps_its_modules_class_names_and_attributes(world: Any) -> None:
    """fully_shard changes the class of the same object, and what nn.Module's walks return stays."""
    model = Tower()
    model.blocks[0].first.weight.marked = "yes"  # type: ignore[attr-defined]
    model.extra = {"any": 1}  # type: ignore[assignment]
    names = [name for name, _ in model.named_modules()]
    parameters = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    block = model.blocks[0]
    assert shard_layers(model, CUTS["blocks"]) is model
    assert isinstance(model, Tower) and isinstance(model, tessera.FSDPModule) and type(model).__name__ == "FSDPTower"
    assert model.blocks[0] is block and isinstance(block, Block) and type(block).__name__ == "FSDPBlock"
    assert [name for name, _ in model.named_modules()] == names
    visited: list[nn.Module] = []
    model.apply(visited.append)
    assert len(visited) == len(names) and visited[-1] is model
    assert model.extra == {"any": 1}
    shards = dict(model.named_parameters())
    assert [(name, tuple(shard.global_shape)) for name, shard in shards.items()] == parameters
    assert shards["blocks.0.first.weight"].marked == "yes"
    assert all(shard.dim() == 1 and isinstance(shard, nn.Parameter) for shard in shards.values())
    for name, shard in block.named_parameters():
        assert shard is shards[f"blocks.0.{name}"]
    assert dict(model.named_parameters(recurse=False)).keys() == {"scale"}


def test_shards_give_whole_tensors_and_their_place(world: Any) -> None:
    """full_tensor() and full_grad() on every rank; ranges of the ranks put together are the parameter."""
    model = Tower()
    plain = Plain(model, world.size)
    shard_layers(model, CUTS["blocks"])
    mse(model, world.rank).backward()
    plain.backward(mse)
    gradients = plain.gradients()
    for name, shard in model.named_parameters():
        whole = plain.parameters()[name]
        assert_bits(name, shard.full_tensor(), whole)
        assert_bits(f"gradient of {name}", shard.full_grad(), gradients[name])
        begin, end = shard.range
        assert_bits(f"shard of {name}", shard.detach(), whole.flatten()[begin:end])
        assert_bits(f"gradient's shard of {name}", shard.grad, gradients[name].flatten()[begin:end])
        assert shard.contract.name == name
