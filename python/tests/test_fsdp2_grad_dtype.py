"""PyTorch's test_fully_shard_grad_dtype.py and test_fully_shard_pending_grad.py in the words of this package.

docs/python_fsdp2.md has the table. `grad_dtype` is a field of a rule here; gradients that wait to be reduced are not
shown, so what upstream reads from `get_pending_gradients()` is read from the sums that they end in.
"""

from __future__ import annotations

import copy

import pytest
import tessera
import torch
from fsdp2_reference import BFLOAT16, FLOAT32
from support import FULL, assert_bits, drawn
from tessera import MixedPrecisionPolicy, Rule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# 1 + 2^-7: its square has 14 bits after the point, which bfloat16 has not.
FINE = 1.0078125


class Wide(torch.autograd.Function):
    """A product whose weight gradient is float32, as compiled and fused kernels give it, for a bfloat16 weight."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
        """Returns x @ weight.T."""
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *slopes: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradients of `x` and, in float32, of `weight`."""
        x, weight = ctx.saved_tensors
        (slope,) = slopes
        return slope @ weight, slope.float().T @ x.float()


class Projection(nn.Module):
    """A weight [16, 16] of 1/8, used by Wide; every rank has some of it."""

    def __init__(self, stored: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((16, 16), 0.125, dtype=stored))
        self.product = Wide.apply

    def forward(self, x: Tensor) -> Tensor:
        """Returns x @ weight.T in the weight's dtype."""
        return self.product(x, self.weight)


class TestPolicy:
    """Upstream: TestGradientDtypePolicy."""

    @pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, "float32"])
    def test_invalid_dtype(self, world: tessera.World, dtype: object) -> None:
        """A gradient dtype that is no floating dtype is refused, at the latest when the module is sharded."""
        policy = MixedPrecisionPolicy(rules=[Rule("weight", grad_dtype=dtype)])  # type: ignore[arg-type]
        with pytest.raises((tessera.Error, TypeError)):
            tessera.fully_shard(nn.Linear(2, 2, bias=False), mp_policy=policy)

    def test_positional_compatibility(self, world: tessera.World) -> None:
        """FSDP2's four fields may be given by their places."""
        policy = MixedPrecisionPolicy(BFLOAT16, FLOAT32, None, False)
        assert (policy.param_dtype, policy.reduce_dtype) == (BFLOAT16, FLOAT32)
        assert policy.output_dtype is None
        assert not policy.cast_forward_inputs


def batch_of(rows: int) -> Tensor:
    """Returns a batch [rows, 16] whose products with themselves need float32."""
    return torch.full((rows, 16), FINE, dtype=BFLOAT16, requires_grad=True)


class TestGradientDtype:
    """Upstream: TestFullyShardGradientDtype."""

    @pytest.mark.parametrize("schedule", ["sync", "no_sync", "checkpoint"])
    @pytest.mark.parametrize("reshard_after_forward", [False, True])
    @pytest.mark.parametrize("stored", [BFLOAT16, FLOAT32])
    def test_fp32_gradient(
        self, world: tessera.World, stored: torch.dtype, reshard_after_forward: bool, schedule: str
    ) -> None:
        """float32 gradients of a bfloat16 weight reach the shard without being rounded, in every schedule."""
        projection = Projection(stored)
        model = nn.Sequential(projection)
        policy = MixedPrecisionPolicy(param_dtype=BFLOAT16)
        tessera.fully_shard(projection, mp_policy=policy, reshard_after_forward=reshard_after_forward)
        tessera.fully_shard(model)
        projection.set_gradient_divide_factor(1.0)
        for step in range(2):
            model.zero_grad(set_to_none=step == 0)
            expected = torch.zeros(16, 16)
            for micro in range(2):
                model.set_requires_gradient_sync(schedule != "no_sync" or micro == 1)
                x = batch_of(2 + micro)
                out = checkpoint(model, x, use_reentrant=False) if schedule == "checkpoint" else model(x)
                out.backward(torch.full_like(out, FINE * (world.rank + 1)))
                for rank in range(world.size):
                    slope = torch.full((2 + micro, 16), FINE * (rank + 1), dtype=BFLOAT16)
                    raw = slope.float().T @ x.detach().float()
                    assert not torch.equal(raw, raw.to(BFLOAT16).float())
                    expected += raw
            assert_bits("gradient", dict(tessera.full_gradients(model))["0.weight"], expected)

    @pytest.mark.parametrize("backend", ["eager", "aot_eager", *(["inductor"] if FULL else [])])
    def test_fp32_gradient_compiled(self, world: tessera.World, backend: str) -> None:
        """What a compiled function gives reaches the shard as it is; inductor's with TESSERA_FULL=1.

        That is float32 of a function that Dynamo alone has traced. In torch 2.13 AOTAutograd, which other backends have
        below, rounds it to the weight's dtype itself, sharded or not.
        """
        projection, plain = Projection(BFLOAT16), Projection(BFLOAT16)
        plain.weight.grad_dtype = None
        for one in (projection, plain):
            one.product = torch.compile(Wide.apply, fullgraph=True, backend=backend)
        tessera.fully_shard(projection, mp_policy=MixedPrecisionPolicy(param_dtype=BFLOAT16))
        expected = torch.zeros(16, 16)
        for rank in range(world.size):
            plain.weight.grad = None
            out = plain(batch_of(2))
            out.backward(torch.full_like(out, FINE * (rank + 1)))
            assert plain.weight.grad is not None
            assert backend != "eager" or plain.weight.grad.dtype == FLOAT32
            expected += plain.weight.grad.float()
        out = projection(batch_of(2))
        out.backward(torch.full_like(out, FINE * (world.rank + 1)))
        assert_bits("gradient", dict(tessera.full_gradients(projection))["weight"], expected / world.size)

    @pytest.mark.parametrize("tied", [False, True])
    @pytest.mark.parametrize("own", [None, FLOAT32, BFLOAT16])
    def test_fp32_gradient_of_a_tensor_with_grad_dtype(
        self, world: tessera.World, own: torch.dtype | None, tied: bool
    ) -> None:
        """The tensor's own `grad_dtype`, set before sharding, rounds what arrives; none and float32 round nothing."""
        model = nn.Sequential(Projection(BFLOAT16), Projection(BFLOAT16))
        model[0].weight.grad_dtype = own
        if tied:
            model[1].weight = model[0].weight
        tessera.fully_shard(model)
        kept = BFLOAT16 if own == BFLOAT16 else FLOAT32
        # The second projection's input is not FINE, but its sum of 16 products, 16 x FINE / 8, which bfloat16 has.
        x, y = batch_of(2).detach(), torch.full((2, 16), 2 * FINE, dtype=BFLOAT16)
        slope = torch.full((2, 16), FINE, dtype=BFLOAT16)
        below = (slope @ torch.full((16, 16), 0.125, dtype=BFLOAT16)).float()
        first, second = below.T @ x.float(), slope.float().T @ y.float()
        out = model(x)
        out.backward(slope)
        found = dict(tessera.full_gradients(model))
        rounded = first.to(kept).float()
        assert_bits("gradient", found["0.weight"], rounded + second.to(kept).float() if tied else rounded)

    @pytest.mark.parametrize("stored", [BFLOAT16, FLOAT32])
    def test_default_gradient_dtype(self, world: tessera.World, stored: torch.dtype) -> None:
        """Without a rule nothing is rounded on arrival: by contract the shard's gradient is float32.

        Upstream rounds the same gradient to bfloat16, and shows it in the stored dtype.
        """
        projection = Projection(stored)
        tessera.fully_shard(projection, mp_policy=MixedPrecisionPolicy(param_dtype=BFLOAT16, reduce_dtype=FLOAT32))
        contract = projection.contract()["weight"]
        assert (contract.compute, contract.grad, contract.final) == (BFLOAT16, None, FLOAT32)
        out = projection(batch_of(2))
        out.backward(torch.full_like(out, FINE))
        found = dict(tessera.full_gradients(projection))["weight"]
        assert_bits("gradient", found, torch.full((16, 16), 2 * FINE * FINE))

    @pytest.mark.parametrize("stored", [BFLOAT16, FLOAT32])
    def test_default_gradient_dtype_as_upstream_by_a_rule(self, world: tessera.World, stored: torch.dtype) -> None:
        """`grad_dtype` of a rule rounds a raw gradient when it arrives, as FSDP2 does by default."""
        projection = Projection(stored)
        policy = MixedPrecisionPolicy(param_dtype=BFLOAT16, rules=[Rule("weight", grad_dtype=BFLOAT16)])
        tessera.fully_shard(projection, mp_policy=policy)
        out = projection(batch_of(2))
        out.backward(torch.full_like(out, FINE))
        rounded = torch.full((16, 16), 2 * FINE * FINE).to(BFLOAT16).float()
        assert_bits("gradient", dict(tessera.full_gradients(projection))["weight"], rounded)

    @pytest.mark.parametrize("reduce_dtype", [BFLOAT16, FLOAT32])
    def test_explicit_reduction_dtype_and_unused_parameter(
        self, world: tessera.World, reduce_dtype: torch.dtype
    ) -> None:
        """A float32 gradient is rounded to `reduce_dtype` on the wire; what no rank uses has no gradient."""
        projection = Projection(BFLOAT16)
        projection.register_parameter("unused", nn.Parameter(torch.zeros(16, 16, dtype=BFLOAT16)))
        policy = MixedPrecisionPolicy(param_dtype=BFLOAT16, reduce_dtype=reduce_dtype)
        tessera.fully_shard(projection, mp_policy=policy, divide_factor=1.0)
        x = batch_of(2)
        out = projection(x)
        out.backward(torch.full_like(out, FINE))
        sent = (torch.full_like(out, FINE).float().T @ x.detach().float()).to(reduce_dtype).float()
        found = dict(tessera.full_gradients(projection))
        assert_bits("gradient", found["weight"], sent * world.size)
        assert_bits("gradient of unused", found["unused"], torch.zeros(16, 16))

    @pytest.mark.parametrize("conversion", ["bfloat16", "half", "to_bfloat16", "cpu"])
    def test_parameter_conversion_with_gradient(self, world: tessera.World, conversion: str) -> None:
        """Casting a sharded module with gradients is refused; parameters, gradients and the next backward stay right.

        Upstream: test_parameter_conversion_with_gradient, test_partial_parameter_conversion_failure,
        test_parameter_dtype_conversion_preserves_gradient.
        """
        projection = Projection(FLOAT32)
        tessera.fully_shard(projection, mp_policy=MixedPrecisionPolicy(param_dtype=BFLOAT16))

        def backward() -> None:
            out = projection(batch_of(3))
            out.backward(torch.full_like(out, FINE))

        backward()
        before = [one.grad.clone() for one in projection.parameters() if one.grad is not None]
        convert = {
            "bfloat16": projection.bfloat16,
            "half": projection.half,
            "to_bfloat16": lambda: projection.to(BFLOAT16),
            "cpu": lambda: projection.to("cpu", BFLOAT16),
        }
        with pytest.raises(tessera.Error, match="before"):
            convert[conversion]()
        for shard, gradient in zip(projection.parameters(), before, strict=True):
            assert shard.grad is not None
            assert_bits("gradient", shard.grad, gradient)
        backward()
        for shard, gradient in zip(projection.parameters(), before, strict=True):
            assert shard.grad is not None
            assert_bits("gradient", shard.grad, gradient * 2)


class TestPendingGradients:
    """Upstream: TestFullyShardPendingGrad."""

    @pytest.mark.parametrize(
        ("contributions", "expected"),
        [(((True, 256), (False, 1), (True, -256)), 1.0), (((True, 3), (False, 256), (False, 1), (True, -256)), 4.0)],
    )
    def test_native_accumulation_dtypes(
        self, world: tessera.World, contributions: tuple[tuple[bool, int], ...], expected: float
    ) -> None:
        """What waits is added in float32: 256 + 1 - 256 keeps the one, which upstream loses in the second case."""
        model = nn.Linear(1, 2, bias=False)
        tessera.fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BFLOAT16))
        for sync, value in contributions:
            model.set_requires_gradient_sync(sync)
            model(torch.full((1, 1), float(value), dtype=BFLOAT16)).sum().backward()
        assert_bits("gradient", dict(tessera.full_gradients(model))["weight"], torch.full((2, 1), expected))

    def test_native_storage_and_mutations(self, world: tessera.World) -> None:
        """Other values than zeros, written into a gradient while something of it waits, are refused by name.

        Upstream shows what waits, and lets it be changed.
        """
        model = nn.Linear(16, 16, bias=False)
        tessera.fully_shard(model)
        for sync in (True, False):
            model.set_requires_gradient_sync(sync)
            model(torch.ones(1, 16)).sum().backward()
        for shard in model.parameters():
            assert shard.grad is not None
            shard.grad.fill_(5.0)
        model.set_requires_gradient_sync(True)
        out = model(torch.ones(1, 16)).sum()
        with pytest.raises(RuntimeError, match="weight"):
            out.backward()
        world.recover()

    @pytest.mark.parametrize("set_to_none", [False, True])
    def test_grouped_clear_after_forward(self, world: tessera.World, set_to_none: bool) -> None:
        """Clearing gradients that stand clears what waits of the same parameters, and of no others."""

        class Both(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = (nn.Linear(4, 4, bias=False) for _ in range(2))

            def forward(self, x: Tensor) -> Tensor:
                return self.first(x) + self.second(x)

        both = Both()
        for one in (both.first, both.second, both):
            tessera.fully_shard(one, mp_policy=MixedPrecisionPolicy(param_dtype=BFLOAT16))
        for sync, value in ((True, 4.0), (False, 2.0)):
            both.set_requires_gradient_sync(sync)
            both(torch.full((1, 4), value, dtype=BFLOAT16)).sum().backward()
        for shard in both.first.parameters():
            assert shard.grad is not None
            if set_to_none:
                shard.grad = None
            else:
                shard.grad.zero_()
        both.set_requires_gradient_sync(True)
        both(torch.ones(1, 4, dtype=BFLOAT16)).sum().backward()
        found = dict(tessera.full_gradients(both))
        assert_bits("gradient of first", found["first.weight"], torch.full((4, 4), 1.0))
        assert_bits("gradient of second", found["second.weight"], torch.full((4, 4), 7.0))

    def test_explicit_sync_divide_factor(self, world: tessera.World) -> None:
        """A factor of 3 divides what is reduced at once and what waits alike."""
        model = nn.Linear(1, 2, bias=False)
        tessera.fully_shard(model)
        model.set_gradient_divide_factor(3.0)
        totals = []
        for sync in (True, False, True):
            model.set_requires_gradient_sync(sync)
            model(torch.full((1, 1), 3.0)).sum().backward()
            if sync:
                totals.append(dict(tessera.full_gradients(model))["weight"])
        for found, micro_batches in zip(totals, (1, 3), strict=True):
            assert_bits("gradient", found, torch.full((2, 1), float(micro_batches * world.size)))


class TestConversion:
    """Upstream: test_fully_shard_conversion.py, which casts or moves a sharded module, with and without gradients."""

    @pytest.mark.parametrize("pending", [False, True])
    @pytest.mark.parametrize(
        ("kind", "stored"), [("single", BFLOAT16), ("single", FLOAT32), ("nested", BFLOAT16), ("shared", FLOAT32)]
    )
    def test_to_matches_plain_module(
        self, world: tessera.World, kind: str, stored: torch.dtype, pending: bool
    ) -> None:
        """A conversion to what a module is keeps everything, also what waits; any other one is refused.

        Upstream: test_same_dtype_to_after_backward, test_nested_conversion_requires_clear,
        test_shared_parameter_conversion_requires_clear, test_pending_grad_conversion_requires_clear,
        test_no_op_conversion_preserves_pending_grad, test_device_only_conversion_requires_clear.
        """
        model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)).to(stored)
        with torch.no_grad():  # whole numbers: sums are exact in every order
            for at, parameter in enumerate(model.parameters()):
                parameter.copy_(drawn(at, shape=(16, 16)).round())
        if kind == "shared":
            model[1].weight = model[0].weight
        plain = copy.deepcopy(model)
        for parameter in plain.parameters():
            parameter.grad_dtype = FLOAT32
        for one in model if kind == "nested" else ():
            tessera.fully_shard(one)
        tessera.fully_shard(model)
        other = FLOAT32 if stored == BFLOAT16 else BFLOAT16
        shards = list(model.parameters())
        for sync in (not pending, True):
            model.set_requires_gradient_sync(sync)
            for one in (model, plain):
                one(drawn(9, shape=(2, 16), dtype=stored).round()).sum().backward()
            assert model.to(stored) is model
            assert model.to("cpu") is model
            for refused in (lambda: model.to(other), model.double, lambda: model.to("meta")):
                with pytest.raises(tessera.Error, match="before"):
                    refused()
            assert all(one is before for one, before in zip(model.parameters(), shards, strict=True))
        for (name, found), expected in zip(tessera.full_parameters(model), plain.parameters(), strict=True):
            assert_bits(name, found, expected.detach())
        for (name, found), expected in zip(tessera.full_gradients(model), plain.parameters(), strict=True):
            assert expected.grad is not None
            assert_bits(name, found, expected.grad)
