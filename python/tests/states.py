"""What the tests of state dicts, states of optimizers and checkpoints have in common."""

from __future__ import annotations

from typing import Any

import torch
from support import MLP_UNITS, Mlp, Plain, assert_bits, assert_same_parameters, drawn, shard_layers
from tessera import SGD, AdamW
from torch import Tensor, nn

# Wide enough that ranks share a weight.
WIDTH = 16


def mse(model: Any, rank: int, step: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the loss of a rank's batch of a step."""
    x = drawn(1, step, rank, shape=(4, WIDTH), dtype=dtype)
    return nn.functional.mse_loss(model(x).float(), drawn(2, step, rank, shape=(4, WIDTH)))


class Counter(nn.Module):
    """A linear layer with state of every kind: extra state, buffers that are persistent and not, a version."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.extra = {"words": ["none"]}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.linear(x) * self.scratch[0]


def assert_same_dicts(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Fails unless both have the same keys in the same order, metadata, and values."""
    assert list(found) == list(expected)
    assert getattr(found, "_metadata", None) == getattr(expected, "_metadata", None)
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert_bits(name, found[name], value)
        else:
            assert found[name] == value


def stepped(world: Any, make: Any, make_plain: Any, steps: int = 2) -> tuple[Any, Any, Any, Any]:
    """Returns a sharded model and the plain one, and their optimizers, after `steps` steps with the same gradients."""
    model = Mlp(WIDTH)
    plain = Plain(model, world.size)
    shard_layers(model, MLP_UNITS)
    optimizer = make(model)
    optimizers = [make_plain(one.parameters()) for one in plain.copies]
    advance(world, model, optimizer, plain, optimizers, steps)
    return model, optimizer, plain, optimizers


def advance(world: Any, model: nn.Module, optimizer: Any, plain: Plain, optimizers: Any, steps: int = 1) -> None:
    """Takes further steps on both sides, which stay equal bit for bit."""
    for step in range(steps):
        mse(model, world.rank, step).backward()
        plain.backward(lambda one, rank, at=step: mse(one, rank, at))
        optimizer.step()
        plain.step(optimizers)
        optimizer.zero_grad()
        plain.zero_grad()
    assert_same_parameters(model, plain)


OPTIMIZERS = {
    "AdamW": (lambda m: AdamW(m, lr=0.01, fused=True), lambda p: torch.optim.AdamW(p, lr=0.01, fused=True)),
    "SGD": (
        lambda m: SGD(m, lr=0.01, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, foreach=False),
    ),
    "torch.AdamW": (
        lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.01),
    ),
    "torch.SGD": (
        lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    ),
}
