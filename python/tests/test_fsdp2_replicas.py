"""PyTorch's FSDP2 cases over replicas (HSDP) on four ranks, two by two; docs/python_fsdp2.md has the table."""

from __future__ import annotations

import pytest
import tessera
import torch
from fsdp2_reference import BFLOAT16, FLOAT32, Alike, Mlp, accumulate, shard_tail
from support import assert_bits, drawn
from tessera import MixedPrecisionPolicy
from test_fsdp2_grad_dtype import FINE, Projection, batch_of
from test_fsdp2_state_dict import nested, save_and_load
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.utils.checkpoint import checkpoint


@pytest.fixture(name="mesh")
def _mesh(world: tessera.World) -> tessera.Mesh:
    """Two replicas of shards over half of the ranks."""
    return tessera.Mesh(dp_replicate=2, dp_shard=world.size // 2)


@pytest.mark.parametrize("synced_last", [True, False])
@pytest.mark.parametrize("width", [3, 17])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("reshard_after_forward", [False, True])
def test_train_parity_hsdp(
    world: tessera.World,
    mesh: tessera.Mesh,
    reshard_after_forward: bool,
    checkpointed: bool,
    width: int,
    synced_last: bool,
) -> None:
    """Shards and replicas train as the plain model, micro-batches reduced each or in the last alone."""

    def shard(model: nn.Sequential) -> None:
        for module in model:
            if checkpointed:
                composable_checkpoint(module)
            tessera.fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)
        tessera.fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)

    torch.manual_seed(42)
    model = nn.Sequential(nn.LayerNorm(width, bias=False), Mlp(width, 3), Mlp(width), Mlp(width, 3))
    alike = Alike(world, model, shard, replicas=2)
    alike.compare_parameters()
    for step in range(2):
        for micro in range(2):
            last = micro == 1
            if synced_last:
                alike.sharded.set_requires_gradient_sync(last)
            alike.backward(
                lambda rank, at=(step, micro): drawn(*at, rank, shape=(4, width)),
                reduced=lambda name, last=last: last or not synced_last,
            )
        alike.step(set_to_none=step % 2 == 0)


@pytest.mark.parametrize(
    ("mode", "reduce_scatter_only"), [("all", False), ("all", True), ("root_only", False), ("some_mlps", False)]
)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_gradient_accumulation(
    world: tessera.World, mesh: tessera.Mesh, reshard_after_forward: bool, mode: str, reduce_scatter_only: bool
) -> None:
    """Micro-batches wait unreduced, or are added over shards and wait for the sum over replicas alone.

    The latter is set for the whole model: `set_requires_all_reduce` knows no single unit.
    """
    torch.manual_seed(42)
    alike = Alike(
        world,
        nn.Sequential(nn.Linear(8, 8), *[Mlp(8) for _ in range(3)]),
        lambda model: shard_tail(model, mesh=mesh, reshard_after_forward=reshard_after_forward),
        replicas=2,
    )
    accumulate(alike, mode, True, reduce_scatter_only)


@pytest.mark.parametrize("schedule", ["sync", "no_sync", "checkpoint"])
@pytest.mark.parametrize("stored", [BFLOAT16, FLOAT32])
def test_fp32_gradient(world: tessera.World, mesh: tessera.Mesh, stored: torch.dtype, schedule: str) -> None:
    """float32 gradients of a bfloat16 weight reach the shard without being rounded, over replicas, too."""
    projection = Projection(stored)
    model = nn.Sequential(projection)
    tessera.fully_shard(projection, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=BFLOAT16))
    tessera.fully_shard(model, mesh=mesh)
    projection.set_gradient_divide_factor(1.0)
    expected = torch.zeros(16, 16)
    for micro in range(2):
        model.set_requires_gradient_sync(schedule != "no_sync" or micro == 1)
        x = batch_of(2 + micro)
        out = checkpoint(model, x, use_reentrant=False) if schedule == "checkpoint" else model(x)
        out.backward(torch.full_like(out, FINE * (world.rank + 1)))
        for rank in range(world.size):
            slope = torch.full((2 + micro, 16), FINE * (rank + 1), dtype=BFLOAT16)
            expected += slope.float().T @ x.detach().float()
    # Every product has 14 bits after the point, and sums stay below 2^9: exact in float32 in any order.
    assert_bits("gradient", dict(tessera.full_gradients(model))["0.weight"], expected)


@pytest.mark.parametrize("clear", ["no", "to_zeros", "to_none"])
def test_native_partial_ownership(world: tessera.World, mesh: tessera.Mesh, clear: str) -> None:
    """Partial sums over replicas and what waits unreduced end in one sum in float32; clearing clears them.

    Clearing goes by the gradient that stands, which clears what waits of the same parameter.
    """
    model = nn.Linear(1, 5, bias=False)
    tessera.fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=BFLOAT16))

    def backward(value: float) -> None:
        model(torch.full((1, 1), value, dtype=BFLOAT16)).sum().backward()

    backward(4.0)
    model.set_requires_all_reduce(False)
    backward(2.0)
    model.set_requires_gradient_sync(False)
    backward(1.0)
    if clear != "no":
        model.zero_grad(set_to_none=clear == "to_none")
    model.set_requires_all_reduce(True)
    model.set_requires_gradient_sync(True)
    backward(16.0)
    found = dict(tessera.full_gradients(model))["weight"]
    assert_bits("gradient", found, torch.full((5, 1), 23.0 if clear == "no" else 16.0))


@pytest.mark.parametrize("width", [2, 3])
def test_dp_state_dict_save_load(world: tessera.World, mesh: tessera.Mesh, width: int) -> None:
    """State dicts of shards and replicas are the plain module's, too."""
    model = nested(width)
    plain = nested(width)
    for child in model:
        tessera.fully_shard(child, mesh=mesh)
    tessera.fully_shard(model, mesh=mesh)
    save_and_load(model, plain)
