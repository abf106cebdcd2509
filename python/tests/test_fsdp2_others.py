"""PyTorch's FSDP2 cases of autograd, gradient norms, the gradient scaler and ignored parameters in our words.

Upstream: test_fully_shard_autograd.py, ..._clip_grad_norm_.py, ..._grad_scaler.py, ..._ignore_params.py.
docs/python_fsdp2.md has the table.
"""

from __future__ import annotations

import collections
import copy
from typing import Any

import pytest
import tessera
import torch
from fsdp2_reference import VOCABULARY, Alike, mlps, shard_children, shard_layers_of, transformer
from support import assert_bits, drawn, tokens
from torch import Tensor, nn


class TwoLinears(nn.Module):
    """Two linear layers on the same input; `both`: the results of both, else of the first alone."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.both = both

    def forward(self, x: Tensor) -> Any:
        """Returns [rows, 8], or two of them."""
        first = self.one(x).relu()
        return (first, self.other(x).relu()) if self.both else first


class TestAutograd:
    """Upstream: TestFullyShardAutograd and the two classes of hooks."""

    @pytest.mark.parametrize("reshard_after_forward", [True, False])
    def test_unused_forward_output(self, world: tessera.World, reshard_after_forward: bool) -> None:
        """Steps whose loss leaves out one of the results give the plain gradients, none to what it came from."""

        def shard(model: TwoLinears) -> None:
            tessera.fully_shard(model.one, reshard_after_forward=reshard_after_forward)
            tessera.fully_shard(model, reshard_after_forward=reshard_after_forward)

        def loss(model: nn.Module, batch: tuple[Tensor, bool]) -> Tensor:
            first, second = model(batch[0])
            return (first * second).sum() if batch[1] else first.sum()

        torch.manual_seed(42)
        alike = Alike(world, TwoLinears(True), shard, loss=loss)
        for step in range(4):
            alike.backward(lambda rank, step=step: (drawn(step, rank, shape=(2, 8)), step < 2))
            alike.step(set_to_none=step % 2 == 1)

    @pytest.mark.parametrize("reshard_after_forward", [True, False])
    def test_unused_forward_module(self, world: tessera.World, reshard_after_forward: bool) -> None:
        """A unit that no forward calls has no gradient and stays as it is, and the others train."""
        torch.manual_seed(42)
        alike = Alike(
            world,
            TwoLinears(False),
            lambda model: shard_children(model, reshard_after_forward=reshard_after_forward),
        )
        alike.train(lambda step, rank: drawn(step, rank, shape=(2, 8)))
        assert all(one.grad is None for one in alike.sharded.other.parameters())

    @pytest.mark.parametrize("kind", [list, tuple, dict, "namedtuple"])
    def test_nontensor_activations(self, world: tessera.World, kind: Any) -> None:
        """Tensors inside of lists, tuples, dicts and named tuples cross the borders of units."""
        named = collections.namedtuple("named", "x y")

        def pack(x: Tensor) -> Any:
            if kind == "namedtuple":
                return named(x, torch.ones_like(x))
            return {"x": x} if kind is dict else kind([x])

        def unpack(value: Any) -> Tensor:
            return value["x"] if kind is dict else value[0]

        class Packs(nn.Module):
            def forward(self, x: Tensor) -> Any:
                return pack(x)

        class Inside(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

            def forward(self, value: Any) -> Any:
                return pack(self.other(self.one(unpack(value)).relu()).relu())

        class Unpacks(nn.Module):
            def forward(self, value: Any) -> Tensor:
                return unpack(value)

        torch.manual_seed(42)
        model = nn.Sequential(Packs(), Inside(), Inside(), Inside(), Unpacks())
        Alike(world, model, shard_children).train(lambda step, rank: drawn(step, rank, shape=(2, 8)))

    def test_post_acc_grad_hook_runs(self, world: tessera.World) -> None:
        """A hook on a shard is refused by name, as nothing of autograd puts its gradient there.

        Upstream calls it once a backward.
        """
        model = mlps(8, 1)[0]
        shard_children(model)
        for shard in model.parameters():
            with pytest.raises(tessera.Error, match="post_accumulate_grad_hook: found parameter .*change .grad"):
                shard.register_post_accumulate_grad_hook(lambda _: None)


class TestClipGradNorm:
    """Upstream: TestClipGradNormWorldSize2."""

    @pytest.mark.parametrize("p", [2.0, 1.0, float("inf")])
    def test_clip_grad_norm_1d(self, world: tessera.World, p: float) -> None:
        """The norm is that of the whole gradient on every rank, and gradients are clipped by it.

        Ours adds powers in float64, torch in float32: the bound is that of torch's additions.
        """
        alike = Alike(world, transformer(), shard_layers_of)
        for step in range(2):
            alike.backward(lambda rank, step=step: tokens(step, rank, shape=(3, 6), below=VOCABULARY))
            alike.compare_gradients()
            whole = [gradient.double().flatten() for gradient in alike._sums.values()]
            expected = torch.linalg.vector_norm(torch.cat(whole), ord=p)
            assert expected > 1.0
            norm = tessera.clip_grad_norm_(alike.sharded, 1.0, norm_type=p)
            assert abs(norm.double() - expected) <= 1e-6 * expected
            scale = 1.0 / (expected + 1e-6)
            for name, found in tessera.full_gradients(alike.sharded):
                error = (found.double() - alike._sums[name].double() * scale).abs().max()
                assert error <= 4 * torch.finfo(torch.float32).eps * alike._sums[name].abs().max(), name
            clipped = torch.cat([gradient.double().flatten() for _, gradient in tessera.full_gradients(alike.sharded)])
            assert torch.linalg.vector_norm(clipped, ord=p) <= 1.0 + 1e-5
            alike.clear()

    def test_clip_grad_norm_of_torch_is_refused(self, world: tessera.World) -> None:
        """torch's function would clip each rank by the norm of its own part, so it is refused, with ours named."""
        model = mlps(8, 1)
        shard_children(model)
        model(drawn(1, world.rank, shape=(2, 8))).sum().backward()
        with pytest.raises(tessera.Error, match=r"tessera\.clip_grad_norm_"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


class TestGradientScaler:
    """Upstream: TestFullyShardGradientScaler."""

    @pytest.mark.parametrize("has_inf", [True, False])
    def test_gradient_scaler(self, world: tessera.World, has_inf: bool) -> None:
        """An infinity on one rank leaves the step out on all and halves the scale; else the step is the plain one.

        Gradients are unscaled in the reduction, so there is no `unscale_()`, and what stands is never scaled.
        """
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(2)])
        plain = copy.deepcopy(model)
        shard_children(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        scaler = tessera.GradScaler(model, init_scale=2.0)
        x = drawn(1, shape=(4, 16))
        scaler.scale(model(x).sum()).backward()
        plain(x).sum().backward()
        for (name, found), expected in zip(tessera.full_gradients(model), plain.parameters(), strict=True):
            assert expected.grad is not None
            assert_bits(name, found, expected.grad)
        if has_inf and world.rank == world.size - 1:
            gradient = next(one.grad for one in model.parameters() if one.grad is not None and one.grad.numel() > 0)
            gradient[0] = float("inf")
        before = [one.detach().clone() for one in model.parameters()]
        scaler.step(optimizer)
        changed = [not torch.equal(old, new.detach()) for old, new in zip(before, model.parameters(), strict=True)]
        assert any(changed) != has_inf
        assert bool(optimizer.state) != has_inf
        scaler.update()
        assert scaler.get_scale() == (1.0 if has_inf else 2.0)

    def test_gradient_scaler_of_torch_is_refused(self, world: tessera.World) -> None:
        """torch's scaler looks for infinities on one rank alone, so it is refused, with ours named."""
        model = mlps(4, 1)
        shard_children(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(model(drawn(1, world.rank, shape=(2, 4))).sum()).backward()
        with pytest.raises(tessera.Error, match=r"tessera\.GradScaler"):
            scaler.unscale_(optimizer)


class InnerC(nn.Module):
    """A linear layer, left alone by the sharding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin_c = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [rows, width]."""
        return self.lin_c(x)


class MiddleB(nn.Module):
    """What is sharded but for `module_c`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin_b = nn.Linear(width, width)
        self.module_c = InnerC(width)
        self.subtrahend = nn.Parameter(drawn(70, shape=(width, width)))

    def forward(self, x: Tensor) -> Tensor:
        """Returns [width, width]."""
        return self.lin_b(self.module_c(x)) - self.subtrahend


class OuterA(nn.Module):
    """A plain module around it with a parameter of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.module_b = MiddleB(width)
        self.addend = nn.Parameter(drawn(42, shape=(width, width)))

    def forward(self, x: Tensor) -> Tensor:
        """Returns a number."""
        return (self.module_b(x) + self.addend).square().sum()


def test_ddp_A_fsdp_B_ddp_C(world: tessera.World) -> None:  # noqa: N802
    """A sharded module between plain ones: `ignored_params` stay whole, plain and their user's to average.

    Upstream averages them by DistributedDataParallel; here the test does by World.all_reduce().
    """
    torch.manual_seed(42)
    model = OuterA(8)
    plain = copy.deepcopy(model)
    ignored = set(model.module_b.module_c.parameters())
    tessera.fully_shard(model.module_b.lin_b, ignored_params=ignored)
    tessera.fully_shard(model.module_b, ignored_params=ignored)
    sharded = {name for name, module in model.named_modules() if isinstance(module, tessera.FSDPModule)}
    assert sharded == {"module_b", "module_b.lin_b"}
    whole = {name for name, _ in tessera.full_parameters(model.module_b)}
    assert whole == {"lin_b.weight", "lin_b.bias", "subtrahend"}
    assert set(model.module_b.module_c.parameters()) == ignored
    own = [model.addend, *model.module_b.module_c.parameters()]
    shards = [one for one in model.module_b.parameters() if isinstance(one, tessera.ShardedParameter)]
    assert len(shards) == 3
    optimizer = torch.optim.Adam([*shards, *own], lr=1e-2)
    plain_optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2)
    for step in range(3):
        loss = model(drawn(step, world.rank, shape=(8, 8)))
        loss.backward()
        for parameter in own:
            assert parameter.grad is not None
            world.all_reduce(parameter.grad).div_(world.size)
        losses = [plain(drawn(step, rank, shape=(8, 8))) for rank in range(world.size)]
        for one in losses:
            one.backward()
        for parameter in plain.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(world.size)
        assert_bits("loss", loss.detach(), losses[world.rank].detach())
        expected = dict(plain.named_parameters())
        for name, found in tessera.full_gradients(model.module_b):
            gradient = expected[f"module_b.{name}"].grad
            assert gradient is not None
            assert_bits(name, found, gradient)
        for one in (optimizer, plain_optimizer):
            one.step()
            one.zero_grad()
        for name, found in tessera.full_parameters(model.module_b):
            assert_bits(name, found, expected[f"module_b.{name}"].detach())
        for name in ("addend", "module_b.module_c.lin_c.weight", "module_b.module_c.lin_c.bias"):
            assert_bits(name, model.get_parameter(name).detach(), expected[name].detach())
