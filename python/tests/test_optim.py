"""Optimizers, clipping and loss scaling over shards compared with torch's own on the unsharded model.

The plain model has every rank's batch (support.Plain), so that both sides have the same gradients bit for bit with two
ranks. Where a test compares within a bound it says why.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import tessera
import torch
from support import (
    MLP_UNITS,
    Mlp,
    Plain,
    assert_bits,
    assert_close,
    assert_same,
    assert_same_gradients,
    assert_same_parameters,
    drawn,
    shard_layers,
)
from tessera import SGD, AdamW, GradScaler, MixedPrecisionPolicy, Muon, OptimizerRule
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

# Wide enough that ranks share a weight.
WIDTH = 16
Maker = Callable[[nn.Module], torch.optim.Optimizer]


def mse(model: Any, rank: int, step: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the loss of a rank's batch of a step."""
    x = drawn(1, step, rank, shape=(4, WIDTH), dtype=dtype)
    return nn.functional.mse_loss(model(x).float(), drawn(2, step, rank, shape=(4, WIDTH)))


def pair(world: Any, seed: int = 3, **options: Any) -> tuple[nn.Module, Plain]:
    """Returns a sharded model of four units and the plain one with the same values."""
    model = Mlp(WIDTH, seed=seed)
    plain = Plain(model, world.size)
    return shard_layers(model, MLP_UNITS, **options), plain


def both_backward(world: Any, model: nn.Module, plain: Plain, step: int) -> None:
    """Runs forward and backward of a step on both sides."""
    mse(model, world.rank, step).backward()
    plain.backward(lambda one, rank: mse(one, rank, step))


def run(world: Any, make: Maker, make_plain: Maker, steps: int = 3, schedule: Any = None) -> None:
    """Steps both sides and compares parameters bit for bit after every step."""
    model, plain = pair(world)
    optimizer = make(model)
    optimizers = [make_plain(one) for one in plain.copies]
    schedulers = [] if schedule is None else [schedule(one) for one in (optimizer, *optimizers)]
    for step in range(steps):
        both_backward(world, model, plain, step)
        optimizer.step()
        plain.step(optimizers)
        assert_same_parameters(model, plain)
        optimizer.zero_grad()
        plain.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    assert optimizer.param_groups[-1]["lr"] == optimizers[0].param_groups[-1]["lr"]


def grouped(one: nn.Module) -> list[dict[str, Any]]:
    """Returns PyTorch's groups of a plain model: biases without decay, the first layer with a tenth of the rate."""
    named = dict(one.named_parameters())
    groups = []
    for name, parameter in named.items():
        decay = 0.0 if name.endswith("bias") else 0.3
        rate = 0.01 * (0.125 if "layers.0." in name else 1)
        groups.append({"params": [parameter], "weight_decay": decay, "lr": rate})
    return groups


class TestFormulas:
    """An optimizer of tessera makes the bits of torch.optim's with the same name."""

    def test_adamw(self, world: Any) -> None:
        """With PyTorch's defaults: those of the arguments are the same, too."""
        run(world, AdamW, lambda one: torch.optim.AdamW(one.parameters(), fused=True))

    def test_adamw_rules(self, world: Any) -> None:
        """no_decay and rules name what PyTorch does by groups."""
        rules = [OptimizerRule("layers.0", lr_scale=0.125)]
        run(
            world,
            lambda m: AdamW(m, lr=0.01, weight_decay=0.3, no_decay="bias", rules=rules),
            lambda one: torch.optim.AdamW(grouped(one), fused=True),
        )

    @pytest.mark.parametrize("momentum", [0.0, 0.9])
    def test_sgd(self, world: Any, momentum: float) -> None:
        """With decay, with and without momentum."""
        run(
            world,
            lambda m: SGD(m, lr=0.1, momentum=momentum, weight_decay=0.05),
            lambda one: torch.optim.SGD(one.parameters(), lr=0.1, momentum=momentum, weight_decay=0.05, foreach=False),
        )

    @pytest.mark.parametrize(
        "name", ["AdamW", "Adam", "SGD", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax", "Rprop"]
    )
    def test_elementwise_of_torch(self, world: Any, name: str) -> None:
        """An elementwise optimizer of torch.optim steps the shards as it steps whole parameters."""
        make = getattr(torch.optim, name)
        run(world, lambda m: make(m.parameters(), lr=0.02), lambda one: make(one.parameters(), lr=0.02), steps=2)

    @pytest.mark.parametrize(
        "schedule",
        [
            lambda o: LambdaLR(o, lambda step: 0.5**step),
            lambda o: OneCycleLR(o, max_lr=0.2, total_steps=6, cycle_momentum=False),
            lambda o: CosineAnnealingLR(o, T_max=4),
        ],
        ids=["LambdaLR", "OneCycleLR", "CosineAnnealingLR"],
    )
    def test_schedulers(self, world: Any, schedule: Any) -> None:
        """PyTorch's schedulers set the rate of the next step."""
        run(
            world,
            lambda m: SGD(m, lr=0.1, momentum=0.5),
            lambda one: torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.5, foreach=False),
            schedule=schedule,
        )

    def test_bfloat16_is_stepped_with_a_master(self, world: Any) -> None:
        """The shard and its remainder together have the bits of AdamW on float32 values with the same gradients."""
        model = shard_layers(Mlp(WIDTH).bfloat16(), MLP_UNITS)
        masters = {name: nn.Parameter(value.float()) for name, value in tessera.full_parameters(model)}
        optimizer = AdamW(model, lr=1e-4)
        reference = torch.optim.AdamW(masters.values(), lr=1e-4, fused=True)
        for step in range(3):
            mse(model, world.rank, step, torch.bfloat16).backward()
            for name, gradient in tessera.full_gradients(model):
                assert gradient.dtype == torch.float32
                masters[name].grad = gradient
            optimizer.step()
            reference.step()
            optimizer.zero_grad()
        state = tessera.get_optimizer_state_dict(model, optimizer)["state"]
        for name, value in tessera.full_parameters(model):
            bits = (value.view(torch.int16).int() << 16) + state[name]["master_remainder"].int()
            assert_bits(name, bits.view(torch.float32), masters[name].detach())
            assert state[name]["master_remainder"].any()

    def test_muon(self, world: Any) -> None:
        """Matrices are orthogonalized whole, in float32; biases are AdamW's bits.

        Within 1e-5 of the formulas on whole tensors: Newton-Schulz adds in another order here.
        """
        model, plain = pair(world)
        optimizer = Muon(model, lr=0.02, weight_decay=0.1, adamw_betas=(0.9, 0.999), no_decay="bias")
        weights = {n: p for n, p in plain.copies[0].named_parameters() if p.ndim == 2}
        biases = {n: p for n, p in plain.copies[0].named_parameters() if p.ndim == 1}
        adamw = torch.optim.AdamW(biases.values(), lr=0.02, weight_decay=0.0, fused=True)
        momenta = {name: torch.zeros_like(p) for name, p in weights.items()}
        for step in range(2):
            mse(model, world.rank, step).backward()
            gradients = dict(tessera.full_gradients(model))
            for name, bias in biases.items():
                bias.grad = gradients[name]
            adamw.step()
            with torch.no_grad():
                for name, weight in weights.items():
                    momenta[name].lerp_(gradients[name], 0.05)
                    direction = gradients[name].lerp(momenta[name], 0.95)
                    weight.mul_(1 - 0.02 * 0.1).add_(orthogonal(direction), alpha=-0.02)
            optimizer.step()
            optimizer.zero_grad()
            for name, value in tessera.full_parameters(model):
                if name in biases:
                    assert_bits(name, value, biases[name].detach())
                else:
                    assert_close(name, value, weights[name].detach(), 1e-5)


def orthogonal(x: Tensor) -> Tensor:
    """Returns five Newton-Schulz iterations of torch.optim.Muon, in float32."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class TestProtocol:
    """What programs do with a torch.optim.Optimizer."""

    def test_closure_hooks_and_counts(self, world: Any) -> None:
        """step(closure) returns the loss of the closure, with gradients on; step hooks of PyTorch are called."""
        model, _ = pair(world)
        optimizer = SGD(model, lr=0.1)
        seen: list[str] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = mse(model, world.rank)
            loss.backward()
            return loss

        with torch.no_grad():
            first = optimizer.step(closure)
        second = optimizer.step(closure)
        assert seen == ["before", "after"] * 2
        assert isinstance(first, Tensor)
        assert second != first
        assert len(optimizer.param_groups) == 1
        if world.size > 1 and world.rank == 0:  # what this file compares is cut inside of weights
            assert any(0 < p.numel() < p.global_shape.numel() for p in model.parameters())
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]

    @pytest.mark.parametrize(
        ("key", "value"), [("betas", (0.5, 0.9)), ("weight_decay", 0.0), ("eps", 1e-6), ("amsgrad", True)]
    )
    def test_other_values_of_the_group_are_refused(self, world: Any, key: str, value: Any) -> None:
        """A value that the update would not see is named by step(), which changes nothing."""
        model, plain = pair(world)
        optimizer = AdamW(model)
        mse(model, world.rank).backward()
        optimizer.param_groups[0][key] = value
        with pytest.raises(tessera.Error, match=f"AdamW: found {key} ") as caught:
            optimizer.step()
        assert caught.value.kind == "usage"
        assert_same_parameters(model, plain)

    def test_one_cycle_of_betas_is_refused_with_the_way(self, world: Any) -> None:
        """OneCycleLR changes betas, too, unless it is told not to."""
        model, _ = pair(world)
        optimizer = AdamW(model)
        OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
        with pytest.raises(tessera.Error, match="cycle_momentum=False"):
            optimizer.step()

    def test_refusals(self, world: Any) -> None:
        """Groups, options that it does not have, and copies of a rank's part are refused by name."""
        model, _ = pair(world)
        optimizer = AdamW(model)
        with pytest.raises(tessera.Error, match="no_decay= or rules="):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        with pytest.raises(tessera.Error, match="found amsgrad=True"):
            AdamW(model, amsgrad=True)
        with pytest.raises(tessera.Error, match="found nesterov=True"):
            SGD(model, nesterov=True)
        with pytest.raises(tessera.Error, match="found dampening"):
            SGD(model, momentum=0.5, dampening=0.1)
        with pytest.raises(tessera.Error, match="found adjust_lr_fn 'other'"):
            Muon(model, adjust_lr_fn="other")
        with pytest.raises(tessera.Error, match="nothing_like_it"):
            AdamW(model, no_decay="nothing_like_it")
        for refused in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError, match=r"tessera\.get_optimizer_state_dict"):
                refused(optimizer)
        with pytest.raises(tessera.Error, match="which is not sharded"):
            AdamW(nn.Linear(2, 2))

    def test_follows_set_trainable(self, world: Any) -> None:
        """After set_trainable() the group has the new shards, and frozen parameters stay; momenta continue."""
        model, plain = pair(world)
        optimizer = SGD(model, lr=0.1, momentum=0.9)
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9, foreach=False) for one in plain.copies]
        for step, frozen in enumerate([False, True, False]):
            model.set_trainable("layers.1", not frozen)
            for one in plain.copies:
                one.get_submodule("layers.1").requires_grad_(not frozen)
            both_backward(world, model, plain, step)
            optimizer.step()
            plain.step(optimizers)
            assert_same_parameters(model, plain)
            optimizer.zero_grad()
            plain.zero_grad()
            assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]

    def test_zero_grad_keeps_memory_where_asked(self, world: Any) -> None:
        """set_to_none=False leaves zeros, as in PyTorch."""
        model, _ = pair(world)
        optimizer = AdamW(model)
        mse(model, world.rank).backward()
        optimizer.zero_grad(set_to_none=False)
        assert all(p.grad is not None and torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())


class TestTorchsOwn:
    """What of PyTorch reads a rank's part as if it were whole is refused, with the way."""

    @pytest.mark.parametrize(
        ("name", "way"), [("LBFGS", "tessera.AdamW"), ("Adafactor", "tessera.AdamW"), ("Muon", "tessera.Muon")]
    )
    def test_optimizers_that_read_shapes(self, world: Any, name: str, way: str) -> None:
        """Refused by class, subclasses, too, at the latest by the first step, and before it changes anything."""
        model, plain = pair(world)
        made = type(f"My{name}", (getattr(torch.optim, name),), {})
        if name == "Muon":  # torch refuses what is not 2-D when it is made
            with pytest.raises(ValueError, match="2D"):
                made(model.parameters(), lr=0.1)
            return
        optimizer = made(model.parameters(), lr=0.1)
        mse(model, world.rank).backward()
        with pytest.raises(tessera.Error, match=f"{name} reads shapes.*{way}") as caught:
            optimizer.step(lambda: mse(model, world.rank)) if name == "LBFGS" else optimizer.step()
        assert caught.value.kind == "usage"
        model.zero_grad()
        assert_same_parameters(model, plain)

    def test_plain_parameters_are_theirs(self) -> None:
        """The same classes step plain parameters as ever."""
        for name in ("LBFGS", "Adafactor"):
            weight = nn.Parameter(torch.ones(2, 2))
            optimizer = getattr(torch.optim, name)([weight], lr=0.1)
            weight.grad = torch.ones(2, 2)
            optimizer.step(lambda w=weight: w.sum())
            assert (weight < 1).all()

    def test_clipping_and_scaling(self, world: Any) -> None:
        """torch's clip_grad_norm_, get_total_norm and GradScaler are refused on every rank, and change nothing."""
        model, plain = pair(world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        both_backward(world, model, plain, 0)
        with pytest.raises(tessera.Error, match="tessera.clip_grad_norm_"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        with pytest.raises(tessera.Error, match="tessera.clip_grad_norm_"):
            nn.utils.get_total_norm([p.grad for p in model.parameters()])
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        with pytest.raises(tessera.Error, match="tessera.GradScaler"):
            scaler.unscale_(optimizer)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        with pytest.raises(tessera.Error, match="tessera.GradScaler"):
            scaler.step(optimizer)
        assert_same_gradients(model, plain)
        assert_same_parameters(model, plain)


class TestClip:
    """Norms of all gradients, and clipping by them."""

    @pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf])
    def test_as_torch_on_the_plain_model(self, world: Any, norm_type: float) -> None:
        """Within 1e-6 of torch's: that adds powers in float32, here they are added in float64."""
        model, plain = pair(world)
        both_backward(world, model, plain, 0)
        one = plain.copies[0]
        for name, parameter in one.named_parameters():
            parameter.grad = plain.gradients()[name].clone()
        expected = nn.utils.clip_grad_norm_(one.parameters(), 0.05, norm_type)
        measured = tessera.gradient_norm(model, norm_type)
        found = tessera.clip_grad_norm_(model, 0.05, norm_type)
        assert found.shape == ()
        assert found.dtype == torch.float32
        assert_bits("norm", measured, found)
        assert abs(found.item() / expected.item() - 1) < 1e-6
        clipped = {name: p.grad for name, p in one.named_parameters()}
        for name, gradient in tessera.full_gradients(model):
            assert_close(name, gradient / clipped[name].abs().max(), clipped[name] / clipped[name].abs().max(), 1e-6)

    def test_large_bound_changes_nothing(self, world: Any) -> None:
        """Gradients below the bound keep their bits."""
        model, plain = pair(world)
        both_backward(world, model, plain, 0)
        tessera.clip_grad_norm_(model, 1e6)
        assert_same_gradients(model, plain)

    def test_zero_bound_and_refusals(self, world: Any) -> None:
        """max_norm 0 gives zeros, as in PyTorch; a negative or NaN bound and a norm of order 0 are refused."""
        model, _ = pair(world)
        mse(model, world.rank).backward()
        for bad in (-1.0, math.nan):
            with pytest.raises(tessera.Error, match="found max_norm"):
                tessera.clip_grad_norm_(model, bad)
        with pytest.raises(tessera.Error, match="found p = 0"):
            tessera.gradient_norm(model, 0.0)
        assert tessera.clip_grad_norm_(model, 0.0) > 0
        assert not any(gradient.any() for _, gradient in tessera.full_gradients(model))

    def test_infinity_on_one_rank(self, world: Any) -> None:
        """Every rank sees it and names the parameter; nothing is scaled."""
        model, _ = pair(world)
        mse(model, world.rank).backward()
        shard = dict(model.named_parameters())["layers.2.bias"]
        if world.rank == world.size - 1:
            shard.grad[-1] = math.inf
        before = tessera.full_gradients(model)
        assert tessera.clip_grad_norm_(model, 1e-3).isinf()
        assert_same("gradient", tessera.full_gradients(model), dict(before))
        assert tessera.nonfinite_parameters(model) == ["layers.2.bias"]
        with pytest.raises(tessera.Error, match=r"layers\.2\.bias") as caught:
            tessera.clip_grad_norm_(model, 1e-3, error_if_nonfinite=True)
        assert caught.value.kind == "numeric"


class TestGradScaler:
    """Loss scaling in the order of calls of torch.amp.GradScaler."""

    @pytest.mark.parametrize("own", [True, False], ids=["tessera.SGD", "torch.optim.SGD"])
    def test_as_torch_on_the_plain_model(self, world: Any, own: bool) -> None:
        """Scales, steps that are left out and parameters have the bits of torch's scaler; the scale grows and falls.

        An overflow in one rank's batch leaves the step out on all ranks.
        """
        model, plain = pair(world, mp_policy=MixedPrecisionPolicy(loss_scaling=True))
        numbers = {"init_scale": 2.0**10, "growth_interval": 2}
        optimizer = SGD(model, lr=0.1) if own else torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, foreach=False) for one in plain.copies]
        scaler = GradScaler(model, **numbers)
        references = [torch.amp.GradScaler("cpu", **numbers) for _ in plain.copies]
        for step in range(5):
            bad = math.inf if step == 2 else 1.0

            def loss_of(one: Any, rank: int, at: int = step, factor: float = bad) -> Tensor:
                return mse(one, rank, at) * (factor if rank == world.size - 1 else 1.0)

            scaler.scale(loss_of(model, world.rank)).backward()
            plain.backward(lambda one, rank: references[rank].scale(loss_of(one, rank)))
            norm = tessera.clip_grad_norm_(model, 1e9) if step % 2 else None
            scaler.step(optimizer, norm=norm)
            scaler.update()
            averages = plain.gradients()
            for one, reference, plain_optimizer in zip(plain.copies, references, optimizers, strict=True):
                for name, parameter in one.named_parameters():
                    parameter.grad = averages[name].clone()
                reference.step(plain_optimizer)
                reference.update()
            assert scaler.get_scale() == references[0].get_scale()
            assert_same_parameters(model, plain)
            optimizer.zero_grad()
            plain.zero_grad()
        state = scaler.state_dict()
        assert state.pop("_skipped_steps") == 1
        assert state == references[0].state_dict()

    def test_gradients_are_never_scaled(self, world: Any) -> None:
        """.grad on the shards has the bits that it has without a scaler."""
        model, plain = pair(world, mp_policy=MixedPrecisionPolicy(loss_scaling=True))
        scaler = GradScaler(model)
        scaler.scale(mse(model, world.rank)).backward()
        plain.backward(lambda one, rank: mse(one, rank))
        assert_same_gradients(model, plain)

    def test_state_and_refusals(self, world: Any) -> None:
        """The state continues in another scaler, also torch's; a scale that rounds, and update() alone are refused."""
        model, _ = pair(world, mp_policy=MixedPrecisionPolicy(loss_scaling=True))
        with pytest.raises(tessera.Error, match="growth_factor"):
            GradScaler(model, growth_factor=3.0)
        scaler = GradScaler(model)
        with pytest.raises(tessera.Error, match="found a model that has one"):
            GradScaler(model)
        with pytest.raises(tessera.Error, match=r"found no step\(\)"):
            scaler.update()
        reference = torch.amp.GradScaler("cpu", init_scale=256.0)
        reference.scale(torch.ones(()))
        scaler.load_state_dict(reference.state_dict())
        assert scaler.get_scale() == 256.0
        with pytest.raises(tessera.Error, match="found growth_interval 7"):
            scaler.load_state_dict({**reference.state_dict(), "growth_interval": 7})
        with pytest.raises(tessera.Error) as caught:
            scaler.load_state_dict({**reference.state_dict(), "scale": 3.0})
        assert caught.value.kind == "config"
        del scaler
        off = GradScaler(model, enabled=False)
        assert off.get_scale() == 1.0
        loss = torch.ones(())
        assert off.scale(loss) is loss
