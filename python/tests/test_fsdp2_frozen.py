"""PyTorch's test_fully_shard_frozen.py in the words of this package; docs/python_fsdp2.md has the table.

Freezing after `fully_shard` goes through `set_trainable`, on all ranks; upstream calls `requires_grad_()`. An optimizer
of torch.optim is made again then, on both sides: its state is of the shards as they lay before.
"""

from __future__ import annotations

import itertools

import pytest
import tessera
import torch
from fsdp2_reference import Alike, mlps, shard_children
from support import drawn
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint


def freeze(model: nn.Module, ending: str, frozen: bool = True) -> None:
    """Freezes or unfreezes the parameters whose names end so, of a plain module."""
    for name, parameter in model.named_parameters():
        if name.endswith(ending):
            parameter.requires_grad_(not frozen)


@pytest.mark.parametrize("freeze_after_init", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("reshard_after_forward", [False, True])
def test_train_mixed_requires_grad_per_group(
    world: tessera.World, reshard_after_forward: bool, checkpointed: bool, freeze_after_init: bool
) -> None:
    """Biases alone are trained, weights of the same units frozen before sharding or after it."""
    model = mlps(8)
    if not freeze_after_init:
        freeze(model, "weight")

    def shard(module: nn.Module) -> None:
        for mlp in module.children() if checkpointed else ():
            composable_checkpoint(mlp)
        shard_children(module, reshard_after_forward=reshard_after_forward)

    alike = Alike(world, model, shard)
    if freeze_after_init:
        alike.sharded.set_trainable("*.weight", False)
        freeze(alike.plain, "weight")
        alike.make_optimizers()
    assert {name for name, _ in tessera.full_gradients(alike.sharded)} == {
        name for name, _ in alike.plain.named_parameters() if name.endswith("bias")
    }
    alike.train(lambda step, rank: drawn(step, rank, shape=(4, 8)))


@pytest.mark.parametrize("unfreeze", [False, True])
@pytest.mark.parametrize("reshard_after_forward", [False, True])
def test_train_mixed_requires_grad_across_groups(
    world: tessera.World, reshard_after_forward: bool, unfreeze: bool
) -> None:
    """Every other unit is frozen, with a step without gradients in between, and unfrozen before the last step."""
    torch.manual_seed(42)
    model = nn.Sequential(*itertools.chain.from_iterable((nn.Linear(8, 8), nn.ReLU()) for _ in range(6)))
    for at in (0, 4, 8):
        model[at].requires_grad_(False)

    def shard(module: nn.Sequential) -> None:
        for linear in module:
            if isinstance(linear, nn.Linear):
                tessera.fully_shard(linear, reshard_after_forward=reshard_after_forward)
        tessera.fully_shard(module, reshard_after_forward=reshard_after_forward)

    alike = Alike(world, model, shard)
    for step in range(3):
        if unfreeze and step == 2:
            alike.sharded.set_trainable(["0", "4", "8"])
            alike.plain.requires_grad_(True)
            alike.make_optimizers()
        if step == 1:
            with torch.no_grad():
                alike.backward(lambda rank: drawn(1, rank, shape=(4, 8)))
            continue
        alike.backward(lambda rank, step=step: drawn(step, rank, shape=(4, 8)))
        alike.step(set_to_none=step % 2 == 0)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_multi_forward_mixed_requires_grad(world: tessera.World, reshard_after_forward: bool) -> None:
    """Trained and frozen units that run several times in one forward, some of them without gradients."""

    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.frozen, self.trained = (nn.Linear(5, 5) for _ in range(3))
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for _ in range(2):
                x = self.frozen(self.trained(x).relu())
                with torch.no_grad():
                    more = self.trained(x).relu()
                x = x + more
            return x

    torch.manual_seed(42)
    alike = Alike(
        world, Several(), lambda model: shard_children(model, reshard_after_forward=reshard_after_forward)
    )
    alike.train(lambda step, rank: drawn(step, rank, shape=(4, 5)))
