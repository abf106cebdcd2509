"""Training programs beside the same programs unsharded: losses, gradients and parameters have the same bits.

Every test computes all ranks' batches on a plain copy of the model (support.py); with two ranks the order of the
additions is the same on both sides. A test that compares within a bound says why.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import pytest
import tessera
import torch
from support import (
    FULL,
    MLP_UNITS,
    Mlp,
    Plain,
    Unitwise,
    assert_bits,
    assert_close,
    assert_same,
    assert_same_gradients,
    assert_same_parameters,
    drawn,
    mean_in_rank_order,
    shard_layers,
    tokens,
)
from tessera import MixedPrecisionPolicy, Rule, fully_shard
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

BFLOAT16 = torch.bfloat16


def mse(model: Any, rank: int, step: int = 0, width: int = 8) -> Tensor:
    """Returns the loss of a rank's batch of a step."""
    x = drawn(1, step, rank, shape=(4, width))
    return nn.functional.mse_loss(model(x).float(), drawn(2, step, rank, shape=(4, width)))


def assert_steps_as_plain(
    world: Any, model: nn.Module, plain: Plain, loss_of: Callable[[Any, int, int], Tensor], steps: int = 2
) -> None:
    """Runs `steps` forwards, backwards and SGD steps of both, and compares losses, gradients, parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in plain.copies]
    for step in range(steps):
        loss = loss_of(model, world.rank, step)
        loss.backward()
        losses = plain.backward(lambda one, rank, at=step: loss_of(one, rank, at))
        assert_bits("loss", loss, losses[world.rank])
        assert_same_gradients(model, plain)
        optimizer.step()
        plain.step(optimizers)
        optimizer.zero_grad()
        plain.zero_grad()
        assert_same_parameters(model, plain)


# --- the program of pytorch issue 156784 ---


class Mixed(nn.Module):
    """Two linear layers in float32 and one in bfloat16, as in the issue."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer1 = nn.Linear(10, 20)
        self.layer2 = nn.Linear(20, 30)
        self.layer3 = nn.Linear(30, 10, dtype=BFLOAT16)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 10] to [rows, 10] in float32."""
        y = torch.relu(self.layer1(x))
        y = torch.relu(self.layer2(y))
        return self.layer3(y.to(BFLOAT16)).float()


MIXED_UNITS = ("layer1", "layer2", "layer3")


@pytest.mark.parametrize("units", [(), MIXED_UNITS], ids=["one unit", "a unit a layer"])
def test_the_program_of_issue_156784_has_the_bits_of_the_unsharded_one(world: Any, units: tuple[str, ...]) -> None:
    """Two epochs of MSE, torch's SGD and StepLR without a policy: losses, gradients and parameters."""
    model = Mixed()
    plain = Plain(model, world.size)
    shard_layers(model, units)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in plain.copies]
    schedulers = [torch.optim.lr_scheduler.StepLR(one, step_size=1, gamma=0.5) for one in optimizers]
    for epoch in range(2):
        for batch in range(3):

            def loss_of(one: Any, rank: int, at: int = 3 * epoch + batch) -> Tensor:
                return mse(one, rank, at, width=10)

            optimizer.zero_grad()
            plain.zero_grad()
            loss = loss_of(model, world.rank)
            loss.backward()
            assert_bits("loss", loss, plain.backward(loss_of)[world.rank])
            assert_same_gradients(model, plain)
            optimizer.step()
            plain.step(optimizers)
        scheduler.step()
        for one in schedulers:
            one.step()
        assert scheduler.get_last_lr() == schedulers[0].get_last_lr()
        assert_same_parameters(model, plain)


@pytest.mark.parametrize("units", [(), MIXED_UNITS], ids=["one unit", "a unit a layer"])
def test_the_program_of_issue_156784_computes_in_the_policys_dtype(world: Any, units: tuple[str, ...]) -> None:
    """param_dtype bf16 and reduce_dtype fp32: gradients have the bits of bf16 copies, and are near those of fp32."""
    model = Mixed()
    plain = Plain(model, world.size)
    narrow = Unitwise(
        model, world.size, units=[*units, ""], compute=lambda name: BFLOAT16, cast=lambda unit: BFLOAT16
    )
    shard_layers(model, units, mp_policy=MixedPrecisionPolicy(param_dtype=BFLOAT16, reduce_dtype=torch.float32))

    def loss_of(one: Any, rank: int) -> Tensor:
        return mse(one, rank, width=10)

    loss = loss_of(model, world.rank)
    loss.backward()
    assert_bits("loss", loss, narrow.backward(loss_of)[world.rank])
    narrow.reduce()
    assert_same_gradients(model, narrow)
    plain.backward(loss_of)
    assert_same_gradients(model, plain, bound=0.05)  # products of bf16 keep 8 bits


# --- units, memory, meshes ---


class Block(nn.Module):
    """Two linear layers beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 8] to [rows, 8]."""
        return x + self.second(torch.tanh(self.first(x)))


class Tower(nn.Module):
    """Two blocks, then a scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 8] to [rows, 8]."""
        for block in self.blocks:
            x = block(x)
        return x * self.scale


CUTS: dict[str, tuple[str, ...]] = {
    "one": (),
    "blocks": ("blocks.0", "blocks.1"),
    "nested": ("blocks.0.first", "blocks.0", "blocks.1.first", "blocks.1.second", "blocks.1"),
    "one of them": ("blocks.1.second",),
}


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("cut", CUTS)
def test_any_cut_into_units_has_the_bits_of_the_plain_model(world: Any, cut: str, reshard: bool | None) -> None:
    """One unit, a unit a block, units inside units, one unit in a plain parent; resharded after forward or not."""
    model = Tower()
    plain = Plain(model, world.size)
    shard_layers(model, CUTS[cut], reshard_after_forward=reshard)
    assert_steps_as_plain(world, model, plain, mse)


def test_small_units_merged_into_the_root_give_the_same_bits(world: Any) -> None:
    """merge_below_bytes moves buckets, never values."""
    model = Tower()
    plain = Plain(model, world.size)
    shard_layers(model, CUTS["nested"], merge_below_bytes=1 << 20)
    assert_steps_as_plain(world, model, plain, mse)


def test_replicas_give_the_same_bits(world: Any) -> None:
    """HSDP: a mesh of as many replicas as ranks."""
    model = Tower()
    plain = Plain(model, world.size)
    mesh = tessera.Mesh(dp_replicate=world.size, dp_shard=1)
    shard_layers(model, CUTS["blocks"], mesh=mesh)
    assert_steps_as_plain(world, model, plain, mse)
    for _, whole in tessera.full_parameters(model):
        assert whole.numel() > 0
    assert all(shard.numel() == shard.global_shape.numel() for shard in model.parameters())


@pytest.mark.parametrize("cut", CUTS)
def test_micro_batches_without_sync_are_added_before_they_are_reduced(world: Any, cut: str) -> None:
    """set_requires_gradient_sync(False) for all but the last micro-batch: the bits of plain accumulation."""
    model = Tower()
    plain = Plain(model, world.size)
    shard_layers(model, CUTS[cut])
    for step in range(2):
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2)
            mse(model, world.rank, 3 * step + micro).backward()
            plain.backward(lambda one, rank, at=3 * step + micro: mse(one, rank, at))
            if micro < 2:
                assert all(shard.grad is None for shard in model.parameters())
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()


def test_micro_batches_with_sync_are_added_after_they_are_reduced(world: Any) -> None:
    """Each backward adds the sum over the ranks to what stands on the shards."""
    model = Tower()
    unitwise = Unitwise(model, world.size)
    shard_layers(model, CUTS["blocks"])
    for micro in range(3):
        mse(model, world.rank, micro).backward()
        unitwise.backward(lambda one, rank, at=micro: mse(one, rank, at))
        unitwise.reduce()
    assert_same_gradients(model, unitwise)


def test_the_last_backward_alone_shows_gradients(world: Any) -> None:
    """set_is_last_backward(False): reductions start, and nothing shows before a backward with True."""
    model = Tower()
    unitwise = Unitwise(model, world.size)
    shard_layers(model, CUTS["blocks"])
    for micro in range(2):
        model.set_is_last_backward(micro == 1)
        mse(model, world.rank, micro).backward()
        assert all((shard.grad is not None) == (micro == 1) for shard in model.parameters())
        unitwise.backward(lambda one, rank, at=micro: mse(one, rank, at))
        unitwise.reduce()
    assert_same_gradients(model, unitwise)


def test_prefetch_lists_and_units_held_by_hand_give_the_same_bits(world: Any) -> None:
    """Forward and backward prefetch, unshard (also async), reshard, units kept after backward."""
    model = Mlp()
    plain = Plain(model, world.size)
    shard_layers(model, MLP_UNITS)
    first, second, third = model.layers
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])
    model.set_reshard_after_backward(False)
    handle = second.unshard(async_op=True)
    third.unshard()
    third.reshard()
    handle.wait()
    assert_steps_as_plain(world, model, plain, mse, steps=3)


def test_a_divide_factor_replaces_the_number_of_ranks(world: Any) -> None:
    """Of the constructor and of the control."""
    for by_control in (False, True):
        model = Tower()
        plain = Plain(model, world.size)
        plain.factor = 3.0
        if by_control:
            shard_layers(model, CUTS["blocks"])
            model.set_gradient_divide_factor(3.0)
        else:
            shard_layers(model, CUTS["blocks"], divide_factor=3.0)
        mse(model, world.rank).backward()
        plain.backward(lambda one, rank: mse(one, rank))
        assert_same_gradients(model, plain)


class Encoder(Tower):
    """A Tower that is called by another method than forward."""

    def encode(self, x: Tensor, *, times: int) -> Tensor:
        """[rows, 8] to [rows, 8]."""
        for _ in range(times):
            x = self.blocks[0](x)
        return x * self.scale


def test_a_registered_method_is_a_forward(world: Any) -> None:
    """register_fsdp_forward_method: gathers, gradients and results as forward's, keywords pass."""
    model = Encoder()
    plain = Plain(model, world.size)
    shard_layers(model, CUTS["blocks"])
    tessera.register_fsdp_forward_method(model, "encode")

    def loss_of(one: Any, rank: int, step: int) -> Tensor:
        return one.encode(drawn(1, step, rank, shape=(4, 8)), times=2).square().mean() + mse(one, rank, step)

    # The first block is called three times: autograd adds the uses of one leaf in the order in which slots do.
    assert_steps_as_plain(world, model, plain, loss_of)


# --- checkpoints ---


class Recomputing(Tower):
    """A Tower with dropout, whose blocks are recomputed as `where` says."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.dropout = nn.Dropout(0.25)

    def _inside(self, block: Any, x: Tensor) -> Tensor:
        return block(self.dropout(x))

    def _all(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self._inside(block, x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 8] to [rows, 8]."""
        if self.where == "around each":
            for block in self.blocks:
                x = checkpoint(self._inside, block, x, use_reentrant=False)
        elif self.where == "around all":
            x = checkpoint(self._all, x, use_reentrant=False)
        elif self.where == "around each and all":

            def twice(y: Tensor) -> Tensor:
                for block in self.blocks:
                    y = checkpoint(self._inside, block, y, use_reentrant=False)
                return y

            x = checkpoint(twice, x, use_reentrant=False)
        else:
            x = self._all(x)
        return x * self.scale


class RecomputingBlock(Block):
    """A Block that recomputes its inside."""

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 8] to [rows, 8]."""
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("where", ["around each", "around all", "around each and all", "inside"])
def test_non_reentrant_checkpoints_give_the_same_bits(world: Any, where: str, cut: str) -> None:
    """Around a unit, around several (nested ones too), checkpoints in checkpoints, inside; with dropout."""
    model = Recomputing(where)
    if where == "inside":
        for i in range(2):
            block = RecomputingBlock()
            block.load_state_dict(model.blocks[i].state_dict())
            model.blocks[i] = block
    plain = Plain(model, world.size)
    shard_layers(model, CUTS[cut])

    def loss_of(one: Any, rank: int, step: int) -> Tensor:
        torch.manual_seed(100 * step + rank)
        return mse(one, rank, step)

    assert_steps_as_plain(world, model, plain, loss_of)


def test_a_checkpoint_around_the_whole_sharded_model_gives_the_same_bits(world: Any) -> None:
    """The outermost unit is called inside of the function that is recomputed."""
    model = Tower()
    plain = Plain(model, world.size)
    shard_layers(model, CUTS["nested"])

    def loss_of(one: Any, rank: int, step: int) -> Tensor:
        x = drawn(1, step, rank, shape=(4, 8)).requires_grad_()
        return checkpoint(one, x, use_reentrant=False).square().mean()  # type: ignore[no-any-return]

    assert_steps_as_plain(world, model, plain, loss_of)


# --- frozen parameters ---


@pytest.mark.parametrize("kept", ["shard", "replicate"])
def test_frozen_parameters_have_no_gradient_and_the_others_the_plain_one(world: Any, kept: str) -> None:
    """Frozen before sharding, kept as a slice or whole."""
    model = Tower()
    model.blocks[0].requires_grad_(False)
    plain = Plain(model, world.size)
    fully_shard(model.blocks[0], mp_policy=MixedPrecisionPolicy(rules=[Rule(["weight", "bias"], frozen=kept)]))
    shard_layers(model, ("blocks.1",))
    assert_steps_as_plain(world, model, plain, mse)
    for name, shard in model.named_parameters():
        assert shard.requires_grad == (not name.startswith("blocks.0"))
        assert shard.grad is None


def test_set_trainable_freezes_and_thaws(world: Any) -> None:
    """What requires_grad_() does between steps of a plain model."""
    model = Tower()
    plain = Plain(model, world.size)
    shard_layers(model, CUTS["blocks"])
    for step, trains in enumerate((True, False, True)):
        model.set_trainable("blocks.0.first.weight", trains)
        for one in plain.copies:
            one.blocks[0].first.weight.requires_grad_(trains)
        mse(model, world.rank, step).backward()
        plain.backward(lambda one, rank, at=step: mse(one, rank, at))
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()


def test_lora_adapters_of_peft_train_in_a_frozen_model(world: Any) -> None:
    """peft wraps first, then its layers are sharded: adapters have the plain gradients, the rest none."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["first", "second"], lora_dropout=0.0)
    model = peft.get_peft_model(Tower(), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(drawn(9, shape=parameter.shape) * 0.1)
    plain = Plain(model, world.size)
    shard_layers(model, ["base_model.model.blocks.0", "base_model.model.blocks.1"])
    assert_steps_as_plain(world, model, plain, mse)
    trained = [name for name, shard in model.named_parameters() if shard.requires_grad]
    assert len(trained) == 8 and all("lora_" in name for name in trained)


def test_an_ignored_parameter_stays_plain(world: Any) -> None:
    """It is neither sharded nor reduced, and requires_grad_() of it works."""
    model = Tower()
    plain = Plain(model, world.size)
    ignored = model.scale
    fully_shard(model, ignored_params={ignored})
    assert model.scale is ignored
    assert "scale" not in dict(tessera.full_parameters(model))
    mse(model, world.rank).backward()
    plain.backward(lambda one, rank: mse(one, rank))
    expected = plain.gradients()
    expected.pop("scale")
    assert_same("gradient", tessera.full_gradients(model), expected)
    assert ignored.grad is not None
    assert_bits("the ignored gradient", ignored.grad, plain.copies[world.rank].scale.grad)
    model.zero_grad()
    ignored.grad = None
    ignored.requires_grad_(False)
    plain.zero_grad()
    mse(model, world.rank, 1).backward()
    plain.backward(lambda one, rank: mse(one, rank, 1))
    expected = plain.gradients()
    expected.pop("scale")
    assert_same("gradient", tessera.full_gradients(model), expected)
    assert ignored.grad is None


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
    """`y = layer(x); y += x; relu_(y)` has the plain gradients; a result that nobody else holds is the caller's."""
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


# --- tied tensors ---


class Tied(nn.Module):
    """An embedding and a head with one weight."""

    def __init__(self, dtype: torch.dtype = torch.float32, device: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.embed = nn.Embedding(11, 8, dtype=dtype, device=device)
        self.block = nn.Linear(8, 8, dtype=dtype, device=device)
        self.head = nn.Linear(8, 11, bias=False, dtype=dtype, device=device)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        """[rows, length] of tokens to [rows, length, 11]."""
        return self.head(torch.tanh(self.block(self.embed(ids))))


def token_loss(model: Any, rank: int, step: int = 0) -> Tensor:
    """Returns the loss of a rank's tokens of a step."""
    ids = tokens(3, step, rank, shape=(3, 5), below=11)
    return nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("units", [(), ("block",), ("embed", "head")])
def test_tied_tensors_have_one_shard_and_the_sum_of_both_gradients(world: Any, units: tuple[str, ...]) -> None:
    """Each place in a unit has a tensor of its own over the same storage; places in units that were sharded one after
    the other stay one object, to which each unit's call gives a gradient of its own. One shard, whichever are units."""
    model = Tied()
    plain = Plain(model, world.size)
    shard_layers(model, units)
    assert (model.head.weight is model.embed.weight) == (units == ("embed", "head"))
    assert not model.contract()["embed.weight"].raw_sum_by_autograd
    assert [name for name, _ in model.named_parameters()] == ["embed.weight", "block.weight", "block.bias"]
    every = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert every == ["embed.weight", "block.weight", "block.bias", "head.weight"]
    assert_steps_as_plain(world, model, plain, token_loss)
    whole = model.state_dict()
    assert_bits("the tied weight", whole["head.weight"], whole["embed.weight"])


@pytest.mark.parametrize("units", [(), ("block",), ("embed",), ("embed", "head")])
def test_tied_gradients_in_bfloat16_are_added_unrounded(world: Any, units: tuple[str, ...]) -> None:
    """Each use is added in float32, where one leaf would round the sum to bfloat16."""
    model = Tied()
    unitwise = Unitwise(model, world.size, units=(*units, ""), compute=lambda name: BFLOAT16)
    shard_layers(model, units, mp_policy=MixedPrecisionPolicy(param_dtype=BFLOAT16))
    token_loss(model, world.rank).backward()
    unitwise.backward(token_loss)
    unitwise.reduce()
    assert_same_gradients(model, unitwise)
    rounded: list[Tensor | None] = []
    for rank in range(world.size):
        one = Tied().to(BFLOAT16)
        token_loss(one, rank).backward()
        rounded.append(one.embed.weight.grad)
    mean = mean_in_rank_order(rounded, world.size, torch.float32)
    assert mean is not None
    exact = unitwise.gradients()["embed.weight"]
    assert not torch.equal(mean, exact)
    assert_close("the rounded sum", mean, exact, 2.0**-6)


def test_ties_are_seen_on_the_meta_device_and_other_tensors_there_are_none(world: Any) -> None:
    """Made on meta, sharded, filled by load_state_dict: the same model as one made with values."""
    source = Tied()
    plain = Plain(source, world.size)
    model = Tied(device="meta")
    shard_layers(model, ("block",))
    assert [name for name, _ in model.named_parameters()] == ["embed.weight", "block.weight", "block.bias"]
    with pytest.raises(tessera.Error, match="values|load"):
        token_loss(model, world.rank)
    world.recover()
    model.load_state_dict(source.state_dict())
    assert_steps_as_plain(world, model, plain, token_loss)


# --- buffers ---


class WithBuffers(nn.Module):
    """A batch norm, and a table that no state dict holds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(10)
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("table", torch.arange(8.0), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 8] to [rows, 8]."""
        return self.norm(self.linear(x)) * self.table


@pytest.mark.parametrize("units", [(), ("linear", "norm")])
def test_buffers_stay_each_ranks_own_and_those_that_are_not_persistent_unsaved(
    world: Any, units: tuple[str, ...]
) -> None:
    """Running statistics move as the plain copy's of this rank, in train and eval; keys of the state dict agree."""
    model = WithBuffers()
    plain = Plain(model, world.size)
    keys = list(model.state_dict())
    shard_layers(model, units)
    assert_steps_as_plain(world, model, plain, mse)
    own = plain.copies[world.rank]
    for name, buffer in own.named_buffers():
        assert_bits(name, dict(model.named_buffers())[name], buffer)
    assert list(model.state_dict()) == keys
    model.eval()
    own.eval()
    x = drawn(4, shape=(3, 8))
    with torch.no_grad():
        assert_bits("the evaluation", model(x), own(x))
    assert not model.norm.training


# --- modes, functions, other torch features ---


def test_functional_call_without_tensors_is_a_call(world: Any) -> None:
    """torch.func.functional_call(model, {}, x)."""
    model = Tower()
    plain = Plain(model, world.size)
    shard_layers(model, CUTS["blocks"])

    def loss_of(one: Any, rank: int, step: int) -> Tensor:
        return torch.func.functional_call(one, {}, (drawn(1, step, rank, shape=(4, 8)),)).square().mean()

    assert_steps_as_plain(world, model, plain, loss_of)


@pytest.mark.parametrize("recompute", [False, True])
def test_autocast_around_the_model_gives_the_same_bits(world: Any, recompute: bool) -> None:
    """Products in bfloat16, everything else as it is; recomputed under the same autocast."""
    model = Recomputing("around each" if recompute else "nowhere")
    plain = Plain(model, world.size)
    shard_layers(model, CUTS["blocks"])

    def loss_of(one: Any, rank: int, step: int) -> Tensor:
        torch.manual_seed(step + rank)
        with torch.autocast("cpu", dtype=BFLOAT16):
            return mse(one, rank, step)

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
    if world.size > 1:  # one rank has nobody to gather from, and keeps its values where they are
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


def test_the_contract_is_a_table_with_reasons_and_a_list(world: Any) -> None:
    """A pin, a policy's compute dtype and the defaults of the seed's program."""
    model = Mixed()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BFLOAT16, rules=[Rule("layer1", pin=True)]))
    contract = model.contract()
    by_name = {one.name: one for one in contract.parameters}
    assert list(by_name) == [name for name, _ in model.named_parameters()]
    first, third = by_name["layer1.weight"], by_name["layer3.weight"]
    assert (first.storage, first.compute, first.accumulate) == (torch.float32,) * 3
    assert (third.storage, third.compute, third.accumulate, third.reduce) == (BFLOAT16, BFLOAT16) + (torch.float32,) * 2
    assert tuple(first.shape) == (20, 10) and first.trainable
    table = str(contract)
    assert all(name in table for name in by_name) and "pin" in table


# --- failures ---


class Failing(Tower):
    """Raises in its second block's place when told to."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 8] to [rows, 8]."""
        x = self.blocks[0](x)
        if self.fails:
            raise ValueError("the user's mistake")
        return self.blocks[1](x) * self.scale


@pytest.mark.parametrize("ranks", ["all", "one"])
def test_an_exception_in_forward_then_recover_then_a_right_step(world: Any, ranks: str) -> None:
    """The rank that raises sees its own exception, the others an error that names it; then all recover."""
    model = Failing()
    plain = Plain(model, world.size)
    shard_layers(model, CUTS["blocks"])
    mse(model, world.rank).backward()
    model.zero_grad()
    model.fails = ranks == "all" or world.rank == 0
    if model.fails:
        with pytest.raises(ValueError, match="the user's mistake"):
            mse(model, world.rank)
        model.fails = False
        if world.size > 1:  # one rank has nobody to meet again
            with pytest.raises(tessera.Error, match="recover"):
                mse(model, world.rank)
    else:
        with pytest.raises(Exception, match="Failing|rank 0|forward") as caught:
            mse(model, world.rank).backward()
        assert isinstance(caught.value, RuntimeError)
    world.recover()
    assert_steps_as_plain(world, model, plain, mse)


# --- many steps ---


def resident_bytes() -> int:
    """Returns the resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize("recompute", [False, True])
def test_steps_leave_nothing_behind(world: Any, recompute: bool) -> None:
    """No tensor more after many steps than after ten, no growth of memory (a leaked weight would be 256 KiB)."""
    model: Any = Recomputing("around all" if recompute else "nowhere")
    for i, block in enumerate(model.blocks):
        for name in ("first", "second"):
            setattr(block, name, nn.Linear(256, 256))
        assert block is model.blocks[i]
    model.scale = nn.Parameter(torch.ones(256))
    shard_layers(model, CUTS["nested"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    counts: list[int] = []
    memory: list[int] = []
    steps = 300 if FULL else 60
    for step in range(steps):
        mse(model, world.rank, step, width=256).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (steps // 3, steps - 1):
            gc.collect()
            counts.append(sum(isinstance(one, Tensor) for one in gc.get_objects()))
            memory.append(resident_bytes())
    assert counts[1] <= counts[0]
    assert memory[1] - memory[0] < 3 << 20


def test_a_model_that_is_dropped_is_freed(world: Any) -> None:
    """Ten models after each other: their shards and modules are gone when nobody holds them."""

    def live() -> int:
        gc.collect()
        return sum(isinstance(one, Block) for one in gc.get_objects())

    before = live()
    for _ in range(10):
        model = Tower()
        shard_layers(model, CUTS["nested"])
        mse(model, world.rank).backward()
        del model
    assert live() == before


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
    """A float32 layer before bfloat16 ones: its float32 input is not rounded, its results go on in bfloat16."""
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
