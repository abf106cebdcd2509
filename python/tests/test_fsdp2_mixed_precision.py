"""PyTorch's test_fully_shard_mixed_precision.py in the words of this package; docs/python_fsdp2.md has the table."""

from __future__ import annotations

import collections
import copy
import dataclasses
from typing import Any

import pytest
import tessera
import torch
from fsdp2_reference import BFLOAT16, FLOAT16, FLOAT32, Alike, mlps, shard_children
from support import assert_bits, drawn
from tessera import MixedPrecisionPolicy
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def rows_of(step: int, rank: int, dtype: torch.dtype = BFLOAT16) -> Tensor:
    """Returns a batch [4, 8]."""
    return drawn(11, step, rank, shape=(4, 8), dtype=dtype)


class TestTraining:
    """Upstream: TestFullyShardMixedPrecisionTraining."""

    @pytest.mark.parametrize("reshard_after_forward", [False, True])
    @pytest.mark.parametrize("param_dtype", [BFLOAT16, FLOAT16])
    def test_compute_dtype(self, world: tessera.World, param_dtype: torch.dtype, reshard_after_forward: bool) -> None:
        """Units compute in `param_dtype`; without `reduce_dtype` ranks are added in float32, and divided once.

        Upstream adds in `param_dtype` then. float16 asks for `loss_scaling`.
        """
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, loss_scaling=param_dtype == FLOAT16)
        alike = Alike(
            world,
            mlps(8),
            lambda model: shard_children(model, mp_policy=policy, reshard_after_forward=reshard_after_forward),
            compute=param_dtype,
        )
        assert {one.reduce for one in alike.sharded.contract().parameters} == {FLOAT32}
        alike.train(lambda step, rank: rows_of(step, rank, param_dtype))

    def test_compute_dtype_float16_is_refused_without_loss_scaling(self, world: tessera.World) -> None:
        """float16 loses small gradients silently, so the policy has to say that the loss is scaled."""
        with pytest.raises(tessera.Error, match="loss_scaling"):
            tessera.fully_shard(nn.Linear(4, 4), mp_policy=MixedPrecisionPolicy(param_dtype=FLOAT16))

    @pytest.mark.parametrize("reshard_after_forward", [False, True])
    @pytest.mark.parametrize(("param_dtype", "reduce_dtype"), [(BFLOAT16, FLOAT32), (FLOAT32, BFLOAT16)])
    def test_reduce_dtype(
        self,
        world: tessera.World,
        param_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        reshard_after_forward: bool,
    ) -> None:
        """What a rank sends is rounded to `reduce_dtype`; the sum over ranks is in float32 in both cases.

        Upstream's ring adds in `reduce_dtype`.
        """
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        alike = Alike(
            world,
            mlps(8),
            lambda model: shard_children(model, mp_policy=policy, reshard_after_forward=reshard_after_forward),
            compute=param_dtype,
            wire=reduce_dtype,
        )
        assert {one.reduce for one in alike.sharded.contract().parameters} == {reduce_dtype}
        assert {one.accumulate for one in alike.sharded.contract().parameters} == {FLOAT32}
        alike.train(lambda step, rank: rows_of(step, rank, param_dtype))

    def test_reduce_dtype_after_frozen_first_forward(self, world: tessera.World) -> None:
        """What is unfrozen after a forward in which all was frozen is reduced in the dtype of the policy.

        A parameter of integers next to it stays frozen and as it is.
        """
        torch.manual_seed(42)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)
        plain = copy.deepcopy(model).to(BFLOAT16).requires_grad_(True)
        model.register_parameter("whole", nn.Parameter(torch.arange(16), requires_grad=False))
        tessera.fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BFLOAT16, reduce_dtype=FLOAT32))
        with torch.no_grad():
            model(rows_of(0, world.rank, FLOAT32))
        model.set_trainable(["0", "1"])
        assert {one.reduce for one in model.contract().parameters if one.trainable} == {FLOAT32}
        model(rows_of(0, world.rank, FLOAT32)).sum().backward()
        expected: dict[str, Tensor] = {}
        for rank in range(world.size):
            plain.zero_grad()
            plain(rows_of(0, rank)).sum().backward()
            for name, parameter in plain.named_parameters():
                assert parameter.grad is not None
                raw = parameter.grad.float()
                expected[name] = expected[name] + raw if name in expected else raw
        for name, found in tessera.full_gradients(model):
            assert_bits(name, found, expected[name] / world.size)
        assert_bits("whole", dict(tessera.full_parameters(model))["whole"], torch.arange(16))

    @pytest.mark.parametrize("reshard_after_forward", [True, False])
    def test_grad_acc_with_reduce_dtype(self, world: tessera.World, reshard_after_forward: bool) -> None:
        """Micro-batches without sync are added in float32, though their gradients are bfloat16."""
        policy = MixedPrecisionPolicy(param_dtype=BFLOAT16, reduce_dtype=FLOAT32)
        alike = Alike(
            world,
            mlps(8),
            lambda model: shard_children(model, mp_policy=policy, reshard_after_forward=reshard_after_forward),
            compute=BFLOAT16,
        )
        for step in range(2):
            for micro in range(4):
                last = micro == 3
                alike.sharded.set_requires_gradient_sync(last)
                alike.sharded.set_reshard_after_backward(last or reshard_after_forward)
                loss = alike.backward(lambda rank, micro=micro: rows_of(micro, rank), reduced=lambda name, on=last: on)
                assert loss.dtype == BFLOAT16
            alike.step(set_to_none=step % 2 == 0)

    @pytest.mark.parametrize(
        ("param_dtype", "reduce_dtype"), [(None, None), (BFLOAT16, BFLOAT16), (BFLOAT16, FLOAT32)]
    )
    @pytest.mark.parametrize("container", ["dataclass", "nested_dataclass", "namedtuple"])
    def test_structured_input_output(
        self,
        world: tessera.World,
        container: str,
        param_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
    ) -> None:
        """Tensors inside of dataclasses and named tuples cross the borders of units as tensors by themselves do.

        A layer is used for two or three tensors of one call, so its raw gradients are autograd's sum.
        """
        torch.manual_seed(42)
        model = nn.Sequential(ToContainer(container), InContainer(8), InContainer(8), FromContainer())
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        alike = Alike(
            world,
            model,
            lambda module: shard_children(module, mp_policy=policy),
            compute=param_dtype,
            wire=reduce_dtype,
        )
        alike.train(lambda step, rank: rows_of(step, rank, param_dtype or FLOAT32))


@dataclasses.dataclass
class Two:
    """Two tensors."""

    x: Tensor
    y: Tensor


@dataclasses.dataclass
class Three:
    """A pair and one more."""

    inner: Two
    z: Tensor


Named = collections.namedtuple("Named", "x y")


class ToContainer(nn.Module):
    """Puts a tensor and copies of it into a container."""

    def __init__(self, container: str) -> None:
        super().__init__()
        self.container = container

    def forward(self, x: Tensor) -> Any:
        """Returns the container."""
        if self.container == "namedtuple":
            return Named(x, x.clone())
        pair = Two(x, x.clone())
        return pair if self.container == "dataclass" else Three(pair, x.clone())


class InContainer(nn.Module):
    """Applies one linear layer to each tensor of a container."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, value: Any) -> Any:
        """Returns a container of the same kind."""
        if isinstance(value, Three):
            return Three(self.forward(value.inner), self.layer(value.z))
        return type(value)(self.layer(value.x), self.layer(value.y))


class FromContainer(nn.Module):
    """Adds the tensors of a container."""

    def forward(self, value: Any) -> Tensor:
        """Returns their sum."""
        return self.forward(value.inner) + value.z if isinstance(value, Three) else value.x + value.y


class Saves(nn.Module):
    """A linear layer that keeps the dtype of its input; `casts`: it brings its input to its weight's dtype itself."""

    def __init__(self, seen: dict[str, torch.dtype], name: str, casts: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self._seen, self._name, self._casts = seen, name, casts

    def forward(self, x: Tensor) -> Tensor:
        """Returns [rows, 8]."""
        self._seen[self._name] = x.dtype
        return self.layer(x.to(self.layer.weight.dtype) if self._casts else x)


class SavesTwo(nn.Module):
    """Two of them, one after the other."""

    def __init__(self, seen: dict[str, torch.dtype], casts: bool) -> None:
        super().__init__()
        self._seen = seen
        self.c1, self.c2 = Saves(seen, "c1", casts), Saves(seen, "c2", casts)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [rows, 8]."""
        self._seen["model"] = x.dtype
        return self.c2(self.c1(x))


class TestCasts:
    """Upstream: TestFullyShardMixedPrecisionCasts. float16 asks for `loss_scaling` everywhere."""

    @pytest.mark.parametrize(
        ("narrow", "casts", "options", "expected"),
        [
            ("c2", False, {}, (FLOAT32, FLOAT32, FLOAT16)),
            ("c2", True, {"cast_forward_inputs": False}, (FLOAT32, FLOAT32, FLOAT32)),
            ("c1", False, {"output_dtype": FLOAT32}, (FLOAT32, FLOAT16, FLOAT32)),
        ],
    )
    def test_float16_on_one_submodule(
        self,
        world: tessera.World,
        narrow: str,
        casts: bool,
        options: dict[str, Any],
        expected: tuple[torch.dtype, torch.dtype, torch.dtype],
    ) -> None:
        """One unit in float16 inside a float32 model gets its input cast, or not, and casts its result if asked to."""
        seen: dict[str, torch.dtype] = {}
        model = SavesTwo(seen, casts)
        policy = MixedPrecisionPolicy(param_dtype=FLOAT16, loss_scaling=True, **options)
        tessera.fully_shard(getattr(model, narrow), mp_policy=policy)
        tessera.fully_shard(model)
        model(torch.zeros(2, 8)).sum().backward()
        assert (seen["model"], seen["c1"], seen["c2"]) == expected
        assert all(gradient.isfinite().all() for _, gradient in tessera.full_gradients(model))

    @pytest.mark.parametrize("cast_inside", [False, True])
    def test_submodules_with_external_inputs(self, world: tessera.World, cast_inside: bool) -> None:
        """An input that a forward makes itself is cast by the unit that takes it, if that casts."""
        seen: dict[str, torch.dtype] = {}

        class Inner(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(8, 8)

            def forward(self, x: Tensor, y: Tensor) -> Tensor:
                seen["x"], seen["y"] = x.dtype, y.dtype
                return self.layer(x)

        class Outer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = nn.Linear(8, 8), Inner()

            def forward(self, x: Tensor) -> Tensor:
                seen["model"] = x.dtype
                return self.second(self.first(x), torch.ones(2, 8))

        model = Outer()
        policy = MixedPrecisionPolicy(param_dtype=FLOAT16, loss_scaling=True)
        tessera.fully_shard(model.second, mp_policy=dataclasses.replace(policy, cast_forward_inputs=cast_inside))
        tessera.fully_shard(model, mp_policy=policy)
        model(torch.zeros(2, 8)).sum().backward()
        assert seen == {"model": FLOAT16, "x": FLOAT16, "y": FLOAT16 if cast_inside else FLOAT32}

    @pytest.mark.parametrize("what", ["inputs", "outputs"])
    def test_checkpoint_recompute_casts(self, world: tessera.World, what: str) -> None:
        """A recomputation casts inputs and outputs of a unit as its first run did.

        Upstream: test_checkpoint_recompute_casts_forward_inputs, test_checkpoint_recompute_casts_outputs.
        """
        inputs: list[torch.dtype] = []
        outputs: list[torch.dtype] = []

        class Recording(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                inputs.append(x.dtype)
                return super().forward(x)

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = Recording(1, 1)

            def again(self, x: Tensor) -> Tensor:
                y = self.layer(x)
                outputs.append(y.dtype)
                return y

            def forward(self, x: Tensor) -> Tensor:
                x = x.to(FLOAT32 if what == "inputs" else BFLOAT16)
                return checkpoint(self.again, x, use_reentrant=False, early_stop=False).float().sum()

        policy = MixedPrecisionPolicy(param_dtype=BFLOAT16, reduce_dtype=BFLOAT16)
        if what == "outputs":
            policy = dataclasses.replace(policy, output_dtype=FLOAT32, cast_forward_inputs=False)
        model = Model()
        tessera.fully_shard(model.layer, mp_policy=policy)
        tessera.fully_shard(model, mp_policy=policy)
        model(drawn(1, world.rank, shape=(8, 1))).backward()
        assert inputs == [BFLOAT16] * 2
        assert outputs == [BFLOAT16 if what == "inputs" else FLOAT32] * 2

    @pytest.mark.parametrize("param_dtype", [BFLOAT16, FLOAT16])
    @pytest.mark.parametrize("case", ["layer_norm", "batch_norm_1d", "batch_norm_2d", "cast_buffers", "policy_of_norm"])
    def test_norm_modules(self, world: tessera.World, case: str, param_dtype: torch.dtype) -> None:
        """Norms as units run forward and backward in 16 bits, or in float32 with their results cast.

        Buffers are left as they are. torch's batch norms on the CPU refuse float32 ones with 16-bit weights, sharded
        or not, as upstream's do on CUDA; once they are cast by their user, they run.

        Upstream: test_norm_modules_bf16, test_norm_modules_fp16.
        """
        if case in ("layer_norm", "batch_norm_1d"):
            norm: nn.Module = nn.LayerNorm(8) if case == "layer_norm" else nn.BatchNorm1d(8)
            model = nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 8))
            x = drawn(1, world.rank, shape=(4, 8))
        else:
            model = nn.Sequential(nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.Conv2d(5, 4, 3))
            x = drawn(1, world.rank, shape=(3, 1, 9, 9))
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, loss_scaling=True)
        own = MixedPrecisionPolicy(output_dtype=param_dtype) if case == "policy_of_norm" else policy
        if case == "cast_buffers":
            for name in ("running_mean", "running_var"):
                setattr(model[1], name, getattr(model[1], name).to(param_dtype))
        for at, module in enumerate((model[0], model[1], model[2], model)):
            tessera.fully_shard(module, mp_policy=own if at == 1 else policy)
        if case in ("batch_norm_1d", "batch_norm_2d"):
            with pytest.raises(RuntimeError, match="expected scalar type"):
                model(x)
            world.recover()
            return
        out = model(x)
        assert out.dtype == param_dtype
        out.sum().backward()
        assert all(gradient.isfinite().all() for _, gradient in tessera.full_gradients(model))

    def test_clamp_reduce_dtype(self, world: tessera.World) -> None:
        """`reduce_dtype` is what the policy says, on modules that are bfloat16 and on such that are float32.

        Upstream casts the sharded module to float32 in between: refused here by name.
        """
        policy = MixedPrecisionPolicy(param_dtype=BFLOAT16, reduce_dtype=BFLOAT16)
        for stored in (BFLOAT16, FLOAT32):
            torch.manual_seed(42)
            model = nn.Sequential(nn.Linear(8, 8, dtype=stored), nn.Linear(8, 8, dtype=stored))
            shard_children(model, mp_policy=policy)
            assert {one.reduce for one in model.contract().parameters} == {BFLOAT16}
            with pytest.raises(tessera.Error, match="before"):
                model.to(FLOAT32 if stored == BFLOAT16 else BFLOAT16)
            model(rows_of(0, world.rank, FLOAT32)).sum().backward()
            assert all(gradient.count_nonzero() for _, gradient in tessera.full_gradients(model))
