"""PyTorch's test_fully_shard_training.py in the words of this package; docs/python_fsdp2.md has the table.

Each function has the name of upstream's case. The plain copy sees every rank's batch, so bits are compared. The cases
of upstream's TrainingCompose: test_fsdp2_training_compose.py.
"""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import time
from typing import Any

import pytest
import tessera
import torch
from fsdp2_reference import (
    Alike,
    ChunkedHead,
    Mlp,
    Transformer,
    accumulate,
    checkpoint_layers,
    ids_of,
    mlps,
    rows_of,
    shard_children,
    shard_layers_of,
    shard_tail,
    transformer,
    units_of,
)
from support import assert_bits, drawn, tokens
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh


class TestForwardInputs:
    """Upstream: TestFullyShardForwardInputs."""

    def test_root_move_forward_input_to_device(self, world: tessera.World) -> None:
        """A unit without parameters takes tensors inside of tuples; they are already where the World is."""

        class Sum(nn.Module):
            def forward(self, x: Tensor, pair: tuple[Tensor, Tensor]) -> Tensor:
                assert all(one.device.type == world.device.type for one in (x, *pair))
                return x + pair[0] + pair[1] + 1

        x, y, z = (drawn(1, part, shape=(3,)) for part in range(3))
        expected = x + y + z + 1
        assert_bits("result", tessera.fully_shard(Sum())(x, (y, z)), expected)

    def test_root_no_forward_inputs(self, world: tessera.World) -> None:
        """A unit whose forward takes nothing is gathered and reduced as any other."""

        class Square(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(drawn(2, shape=(4, 4)))

            def forward(self) -> Tensor:
                return self.weight @ self.weight

        alike = Alike(world, Square(), tessera.fully_shard, loss=lambda model, batch: (model() * batch).sum())
        for step in range(2):
            alike.backward(lambda rank, step=step: float(1 + rank + 2 * step))
            alike.step()


class TestRegisteredParams:
    """Upstream: TestFullyShardRegisteredParams. What `parameters()` gives is always the shards."""

    @staticmethod
    def _is_whole(linear: nn.Linear, expected: Tensor) -> bool:
        try:
            return torch.equal(linear.weight.detach().clone(), expected)
        except RuntimeError as error:
            if "sharded" not in str(error):
                raise
            return False

    @pytest.mark.parametrize("nested", [False, True])
    @pytest.mark.parametrize("reshard_after_forward", [True, False, None])
    def test_param_registration_after_forward(
        self, world: tessera.World, reshard_after_forward: bool | None, nested: bool
    ) -> None:
        """After a forward a unit that stays shows whole parameters until reshard(), one that is resharded throws."""
        model = mlps(3, 1)
        plain = copy.deepcopy(model)
        for linear in (model[0].in_proj, model[0].out_proj) if nested else ():
            tessera.fully_shard(linear, reshard_after_forward=reshard_after_forward)
        tessera.fully_shard(model, reshard_after_forward=reshard_after_forward)
        pairs = [(getattr(model[0], name), getattr(plain[0], name).weight) for name in ("in_proj", "out_proj")]
        assert all(isinstance(one, tessera.ShardedParameter) for one in model.parameters())
        assert not any(self._is_whole(linear, expected) for linear, expected in pairs)
        out = model(drawn(1, world.rank, shape=(2, 3)))
        stays = reshard_after_forward is False or (reshard_after_forward is None and not nested)
        assert [self._is_whole(linear, expected) for linear, expected in pairs] == [stays, stays]
        assert all(isinstance(one, tessera.ShardedParameter) for one in model.parameters())
        del out
        for unit in units_of(model):
            unit.reshard()
        assert not any(self._is_whole(linear, expected) for linear, expected in pairs)
        for (name, found), expected in zip(tessera.full_parameters(model), plain.parameters(), strict=True):
            assert_bits(name, found, expected.detach())

    @pytest.mark.parametrize("nested", [False, True])
    @pytest.mark.parametrize("reshard_after_forward", [True, False])
    def test_param_registration_after_backward(
        self, world: tessera.World, reshard_after_forward: bool, nested: bool
    ) -> None:
        """After a backward no unit shows whole parameters, independent of what it did after forward."""
        model = mlps(8, 1)
        plain = copy.deepcopy(model)
        for linear in (model[0].in_proj, model[0].out_proj) if nested else ():
            tessera.fully_shard(linear, reshard_after_forward=reshard_after_forward)
        tessera.fully_shard(model, reshard_after_forward=reshard_after_forward)
        model(drawn(1, world.rank, shape=(2, 8))).sum().backward()
        for name in ("in_proj", "out_proj"):
            assert not self._is_whole(getattr(model[0], name), getattr(plain[0], name).weight)
        assert all(isinstance(one, tessera.ShardedParameter) for one in model.parameters())


class TestCastAfterInit:
    """Upstream: TestFullyShardCastAfterInit."""

    def test_to_float64_after_init(self, world: tessera.World) -> None:
        """A sharded module is not cast; one that is cast before trains in float64 throughout."""
        torch.manual_seed(42)
        sharded = Mlp(4)
        tessera.fully_shard(sharded)
        for cast in (lambda: sharded.to(torch.float64), sharded.double, sharded.half, sharded.bfloat16):
            with pytest.raises(tessera.Error, match="before"):
                cast()
        alike = Alike(world, Mlp(4).to(torch.float64), shard_children)
        for step in range(3):
            alike.backward(lambda rank, step=step: drawn(1, step, rank, shape=(2, 4), dtype=torch.float64))
            alike.step(set_to_none=step % 2 == 0)
        assert {one.dtype for one in alike.sharded.parameters()} == {torch.float64}


class TestTrainingCore:
    """Upstream: TestFullyShard1DTrainingCore."""

    @pytest.mark.parametrize("shapes", [((16, 15), (15, 8)), ((7, 15), (15, 3)), ((16, 17), (17, 8))])
    def test_train_parity_single_group_shard_dim0(
        self, world: tessera.World, shapes: tuple[tuple[int, int], tuple[int, int]]
    ) -> None:
        """One unit with dims that the ranks do not divide trains as the plain model."""
        torch.manual_seed(42)
        model = nn.Sequential(nn.Linear(*shapes[0]), nn.ReLU(), nn.Linear(*shapes[1]))
        Alike(world, model, tessera.fully_shard).train(rows_of(shapes[0][0]))

    def test_train_parity_single_group_shard_largest_dim(self, world: tessera.World) -> None:
        """`shard_placement_fn` is refused by name, since buckets are cut by elements; the shapes train without it."""
        torch.manual_seed(42)
        model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8))
        with pytest.raises(tessera.Error, match="shard_placement_fn"):
            tessera.fully_shard(model, shard_placement_fn=lambda parameter: None)
        Alike(world, model, tessera.fully_shard).train(rows_of(32))

    @pytest.mark.parametrize("late", ["none", "after_forward", "before_backward", "before_step", "everywhere"])
    @pytest.mark.parametrize("reshard_after_forward", [True, False, None])
    def test_train_parity_multi_group(
        self, world: tessera.World, reshard_after_forward: bool | None, late: str
    ) -> None:
        """A unit a layer trains as the plain model, also where one rank is late in every phase of a step."""

        def wait(where: str) -> None:
            if late in (where, "everywhere") and world.rank == world.size - 1:
                time.sleep(0.01)

        alike = Alike(
            world, transformer(), lambda model: shard_layers_of(model, reshard_after_forward=reshard_after_forward)
        )
        for step in range(2):
            wait("before_backward")
            alike.backward(lambda rank, step=step: ids_of(step, rank), between=lambda: wait("after_forward"))
            wait("before_step")
            alike.step(set_to_none=step % 2 == 0)

    def test_train_parity_multi_group_cpu_offload_eager(self, world: tessera.World) -> None:
        """`offload_policy` is refused by name: parameters, gradients and steps are where the World's device is."""
        from torch.distributed.fsdp import CPUOffloadPolicy

        with pytest.raises(tessera.Error, match="offload_policy"):
            tessera.fully_shard(nn.Linear(2, 2), offload_policy=CPUOffloadPolicy(pin_memory=False))

    def test_train_parity_multi_group_unshard_async_op(self, world: tessera.World) -> None:
        """Units whose gathers are started by hand before the forward train as the plain model."""
        alike = Alike(world, transformer(3), shard_layers_of)
        for step in range(3):
            handles = [layer.unshard(async_op=True) for layer in alike.sharded.layers]
            for handle in handles[: step + 1]:
                handle.wait()
            alike.backward(lambda rank, step=step: ids_of(step, rank))
            alike.step(set_to_none=step % 2 == 0)

    def test_non_root_forward_backward(self, world: tessera.World) -> None:
        """A step through a unit inside, past the outermost one, trains that unit alone."""
        alike = Alike(world, mlps(8), shard_children)
        alike.backward(lambda rank: drawn(1, rank, shape=(8, 8)))
        alike.step()
        alike.backward(lambda rank: drawn(1, rank, shape=(8, 8)), loss=lambda model, batch: model[0](batch).sum())
        alike.step()
        alike.backward(lambda rank: drawn(1, rank, shape=(8, 8)))
        alike.step()

    @pytest.mark.parametrize("reshard_after_forward", [True, False])
    def test_multi_forward_module(self, world: tessera.World, reshard_after_forward: bool) -> None:
        """A unit that is called twice in a forward has the sum of both uses."""

        class Twice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(4, 4)
                self.outer = nn.Linear(4, 5)

            def forward(self, x: Tensor) -> Tensor:
                return self.outer(self.inner(x) + self.inner(x))

        def shard(model: Twice) -> None:
            tessera.fully_shard(model.inner, reshard_after_forward=reshard_after_forward)
            tessera.fully_shard(model)

        torch.manual_seed(42)
        Alike(world, Twice(), shard).train(rows_of(4, 32))

    def test_explicit_prefetching(self, world: tessera.World) -> None:
        """Lists of the units that are gathered next, forward and backward, change no bit."""
        alike = Alike(world, transformer(5), shard_layers_of)
        layers = list(alike.sharded.layers)
        for at, layer in enumerate(layers):
            ahead, behind = layers[at + 1 : at + 3], layers[max(0, at - 2) : at][::-1]
            if len(ahead) == 2:
                layer.set_modules_to_forward_prefetch(ahead)
            if len(behind) == 2:
                layer.set_modules_to_backward_prefetch(behind)
        alike.train(ids_of)


class TestShardPlacementFn:
    """Upstream: TestFullyShardShardPlacementFnMultiProcess and its neighbour."""

    def test_shard_placement_fn_contiguous_params_grads(self, world: tessera.World) -> None:
        """Shards, whole parameters inside a forward, and gradients are contiguous."""
        model = mlps(4, 1)[0]

        def look(module: nn.Module, arguments: Any) -> None:
            seen.append(all(one.is_contiguous() for one in module._parameters.values() if one is not None))

        seen: list[bool] = []
        shard_children(model)
        assert all(one.is_contiguous() for one in model.parameters())
        for linear in (model.in_proj, model.out_proj):
            linear.register_forward_pre_hook(look)
        model(drawn(1, world.rank, shape=(2, 4))).sum().backward()
        assert seen == [True, True]
        assert all(one.grad is not None and one.grad.is_contiguous() for one in model.parameters())


class TestWorldSize1:
    """Upstream: TestFullyShardWorldSize1."""

    def test_train_parity_single_worldsize1(self, world: tessera.World) -> None:
        """In a plain process, a World of one rank, one unit trains as the plain model: the cases of dim 0 once more."""
        if world.rank == 0:
            own = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD", "LOCAL"))}
            for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"):
                own.pop(name, None)
            words = [sys.executable, "-m", "pytest", "-q", "-k", "single_group_shard_dim0", __file__]
            ended = subprocess.run(words, env=own, capture_output=True, text=True, check=False)
            assert ended.returncode == 0, ended.stdout
            assert "3 passed" in ended.stdout
        world.barrier()


class TestSharedParams:
    """Upstream: TestFullyShardSharedParams."""

    @pytest.mark.parametrize("checkpointed", [False, True])
    @pytest.mark.parametrize("reshard_after_forward", [False, True])
    def test_train_parity_with_shared_params(
        self, world: tessera.World, reshard_after_forward: bool, checkpointed: bool
    ) -> None:
        """A model whose output is tied to its embedding trains as the plain one."""

        def shard(model: Transformer) -> None:
            if checkpointed:
                checkpoint_layers(model, "composable")
            shard_layers_of(model, reshard_after_forward=reshard_after_forward)

        Alike(world, transformer(3, tied=True), shard).train(ids_of)

    def test_train_shared_params_uneven_shard(self, world: tessera.World) -> None:
        """Every row of a tied weight that the ranks do not divide is trained."""

        class Tied(nn.Module):
            def __init__(self, rows: int) -> None:
                super().__init__()
                self.embed = nn.Embedding(rows, 5)
                self.head = nn.Linear(5, rows, bias=False)
                self.head.weight = self.embed.weight

            def forward(self, ids: Tensor) -> Tensor:
                return self.head(self.embed(ids))

        rows = 4 * world.size + 1
        torch.manual_seed(42)
        model = Tied(rows)
        before = model.embed.weight.detach().clone()
        alike = Alike(world, model, tessera.fully_shard, loss=lambda module, ids: module(ids).logsumexp(-1).sum())
        alike.train(lambda step, rank: tokens(3, step, rank, shape=(2, 8), below=rows))
        after = dict(tessera.full_parameters(model))["embed.weight"]
        assert (before != after).any(dim=1).all()

    def test_shared_params_separate_fsdp_groups_error(self, world: tessera.World) -> None:
        """A tensor that two units share is the ancestor's when all are sharded: no error, and the plain gradients."""

        def shard(model: ChunkedHead) -> None:
            tessera.fully_shard(model.embed)
            tessera.fully_shard(model.head)
            tessera.fully_shard(model)

        torch.manual_seed(42)
        Alike(world, ChunkedHead(tied=True), shard).train(ids_of)

    def test_layer_by_layer_shard_no_false_positive(self, world: tessera.World) -> None:
        """Layers that are made, sharded and left to the garbage collector in turn are not taken for one another."""

        class Layers(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList()

            def forward(self, x: Tensor) -> Tensor:
                for block in self.blocks:
                    x = block(x)
                return x

        torch.manual_seed(42)
        model, plain = Layers(), Layers()
        for _ in range(6):
            block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8, bias=False))
            plain.blocks.append(copy.deepcopy(block))
            model.blocks.append(tessera.fully_shard(block))
            del block
            gc.collect()
        tessera.fully_shard(model)
        x = drawn(1, shape=(2, 8))
        assert_bits("result", model(x), plain(x))
        model(x).sum().backward()
        plain(x).sum().backward()
        for (name, found), expected in zip(tessera.full_gradients(model), plain.parameters(), strict=True):
            assert expected.grad is not None
            assert_bits(name, found, expected.grad)


class TestGradientAccumulation:
    """Upstream: TestFullyShardGradientAccumulation, without replicas; those are in test_fsdp2_replicas.py."""

    @pytest.mark.parametrize("mode", ["all", "root_only", "some_mlps"])
    @pytest.mark.parametrize(
        ("reshard_after_forward", "reshard_after_backward"), [(True, True), (False, True), (False, False)]
    )
    def test_gradient_accumulation(
        self, world: tessera.World, reshard_after_forward: bool, reshard_after_backward: bool, mode: str
    ) -> None:
        """Three micro-batches with and without sync of all units, of the outermost or of some, add as they should."""
        torch.manual_seed(42)
        alike = Alike(
            world,
            nn.Sequential(nn.Linear(8, 8), *[Mlp(8) for _ in range(3)]),
            lambda model: shard_tail(model, reshard_after_forward=reshard_after_forward),
        )
        accumulate(alike, mode, reshard_after_backward)

    @pytest.mark.parametrize("reshard_after_backward", [False, True])
    @pytest.mark.parametrize("use_explicit_unshard", [False, True])
    def test_1f1b_microbatching(
        self, world: tessera.World, use_explicit_unshard: bool, reshard_after_backward: bool
    ) -> None:
        """One forward, one backward, with sync and waiting in the last micro-batch alone."""
        alike = Alike(world, transformer(), lambda model: shard_layers_of(model, reshard_after_forward=False))
        if use_explicit_unshard:
            for unit in units_of(alike.sharded):
                unit.unshard(async_op=True)
        for micro in range(3):
            last = micro == 2
            alike.sharded.set_requires_gradient_sync(last)
            alike.sharded.set_is_last_backward(last)
            if not reshard_after_backward:
                alike.sharded.set_reshard_after_backward(last)
            alike.backward(lambda rank, micro=micro: ids_of(micro, rank), reduced=lambda name, last=last: last)
        alike.step()


class TestCustomForwardMethod:
    """Upstream: TestFullyShardCustomForwardMethod."""

    def test_register_fsdp_forward_method(self, world: tessera.World) -> None:
        """A method that is registered gathers and reduces its unit as the forward does."""

        class Vision(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.patches = nn.Conv2d(3, 8, kernel_size=4, stride=4)

            def features(self, images: Tensor) -> Tensor:
                return self.patches(images).flatten(2).transpose(1, 2)

            def forward(self, images: Tensor) -> Tensor:
                return self.features(images).sum(dim=1)

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.vision, self.projector = Vision(), nn.Linear(8, 4)

            def forward(self, images: Tensor) -> Tensor:
                return self.projector(self.vision.features(images))

        def shard(model: Model) -> None:
            shard_children(model)
            tessera.register_fsdp_forward_method(model.vision, "features")

        torch.manual_seed(42)
        Alike(world, Model(), shard).train(lambda step, rank: drawn(step, rank, shape=(2, 3, 8, 8)), steps=2)


class TestShareCommContext:
    """Upstream: TestFullyShardShareCommContext."""

    def test_share_comm_context(self, world: tessera.World) -> None:
        """Units without an outermost one share the World's queue: nothing is to be set."""
        model = mlps(8)
        plain = copy.deepcopy(model)
        for layer in model:
            tessera.fully_shard(layer)
        for rank in range(world.size):
            plain(drawn(1, rank, shape=(4, 3, 8))).sum().backward()
        model(drawn(1, world.rank, shape=(4, 3, 8))).sum().backward()
        for layer, expected in zip(model, plain, strict=True):
            for (name, found), own in zip(tessera.full_gradients(layer), expected.parameters(), strict=True):
                assert own.grad is not None
                assert_bits(name, found, own.grad / world.size)


@pytest.mark.parametrize("names", [("dp", "tp"), ("dp_replicate", "dp_shard", "tp"), ("ep",)])
def test_meshes_of_models_are_refused(world: tessera.World, names: tuple[str, ...]) -> None:
    """A DeviceMesh with an axis over which models are cut is refused by name; upstream: TestFullyShardNDTraining."""
    shape = (*(1 for _ in names[1:]), world.size)
    ranks = torch.arange(world.size).view(shape)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=world.rank)
    with pytest.raises(tessera.Error, match=names[-1]):
        tessera.fully_shard(nn.Linear(2, 2), mesh=mesh)
