"""Training programs compared with the same programs unsharded: losses, gradients and parameters have the same bits.

Every test computes all ranks' batches on a plain copy of the model (support.py); with two ranks the order of the
additions is the same on both sides. A test that compares within a bound says why. What passes a unit's border, and what
it shows: test_module.py.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import tessera
import torch
from support import (
    CUTS,
    FULL,
    MLP_UNITS,
    Block,
    Mlp,
    Plain,
    Tower,
    Unitwise,
    assert_bits,
    assert_close,
    assert_same,
    assert_same_gradients,
    assert_same_parameters,
    assert_steps_as_plain,
    drawn,
    mean_in_rank_order,
    mse,
    shard_layers,
    tokens,
)
from tessera import MixedPrecisionPolicy, Rule, fully_shard
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

BFLOAT16 = torch.bfloat16


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


# --- units, memory, meshes ---


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
    """Each backward adds the sum over the ranks to what the shards hold."""
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
        if world.size > 1:  # one rank has no other to meet again
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
    """Ten models after each other: their shards and modules are gone when nothing holds them."""

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
