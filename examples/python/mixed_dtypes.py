#!/usr/bin/env python3
"""A model of fp32 and bf16 layers in one unit: the program of pytorch issue 156784, which FSDP2 refuses.

    torchrun --standalone --nproc-per-node 2 examples/python/mixed_dtypes.py [--epochs 4] [--param-dtype bfloat16]
    python examples/python/mixed_dtypes.py                           (one rank)

needs the package `tessera` (docs/python.md, Installing). Linear(10, 20) and Linear(20, 30) are in fp32,
Linear(30, 10) in bf16; mean squared error, SGD, a learning rate that falls every other epoch. Each rank has rows of its
own. Every rank also trains the plain model on the rows of all ranks, and at the end both have the
same bits. With --param-dtype all layers compute in that dtype, in any storage dtype, and nothing is compared.
"""

import argparse
import copy

import torch
from tessera import MixedPrecisionPolicy, full_parameters, fully_shard, init
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

BATCHES, ROWS = 5, 8


class Model(nn.Module):
    """Three layers, the last one in bf16."""

    def __init__(self) -> None:
        """Draws the values."""
        super().__init__()
        self.layer1 = nn.Linear(10, 20)
        self.layer2 = nn.Linear(20, 30)
        self.layer3 = nn.Linear(30, 10, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [rows, 10] in fp32 for [rows, 10]."""
        x = torch.relu(self.layer1(x))
        x = torch.relu(self.layer2(x.to(self.layer2.weight.dtype)))
        return self.layer3(x.to(self.layer3.weight.dtype)).float()


def rows_of(epoch: int, batch: int, rank: int) -> tuple[Tensor, Tensor]:
    """Returns the inputs and targets that a rank trains on, each [rows, 10]."""
    drawn = torch.Generator().manual_seed(1000 * epoch + 10 * batch + rank)
    x = torch.randn(ROWS, 10, generator=drawn)
    return x, torch.sin(x)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int, batch: int, ranks: int) -> None:
    """One step of the plain model on the rows of all ranks: their gradients are added in fp32 and averaged."""
    parameters = list(model.parameters())
    sums = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters]
    for rank in range(ranks):
        x, y = rows_of(epoch, batch, rank)
        nn.functional.mse_loss(model(x), y).backward()
        for total, parameter in zip(sums, parameters, strict=True):
            total += parameter.grad
            parameter.grad = None
    for total, parameter in zip(sums, parameters, strict=True):
        parameter.grad = (total / ranks).to(parameter.dtype)
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    """Trains both models and compares them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--param-dtype", choices=("float32", "bfloat16"))
    arguments = parser.parse_args()

    world = init()
    torch.manual_seed(0)  # the same first values on every rank
    model = Model()
    plain = copy.deepcopy(model)

    # SGD steps the shards as they are stored: without master="none" the bf16 ones would have 32 bits to be stepped in.
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, arguments.param_dtype) if arguments.param_dtype else None, master="none"
    )
    fully_shard(model, mp_policy=policy)
    if world.rank == 0:
        print(model.contract())

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.5)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain_scheduler = StepLR(plain_optimizer, step_size=2, gamma=0.5)
    for epoch in range(arguments.epochs):
        total = torch.zeros(())
        for batch in range(BATCHES):
            x, y = rows_of(epoch, batch, world.rank)
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            plain_step(plain, plain_optimizer, epoch, batch, world.size)
            total += loss.detach()
        scheduler.step()
        plain_scheduler.step()
        mean = world.all_reduce(total) / (BATCHES * world.size)
        if world.rank == 0:
            print(f"epoch {epoch}  loss {mean.item():.5f}  lr {scheduler.get_last_lr()[0]:g}", flush=True)

    if arguments.param_dtype is None:
        expected = dict(plain.named_parameters())
        equal = [torch.equal(value, expected[name]) for name, value in full_parameters(model)]
        if not all(equal):
            raise SystemExit(f"found {sum(equal)} of {len(equal)} parameters equal to the plain model's, expected all")
        if world.rank == 0:
            print(f"all {len(equal)} parameters are equal to the plain model's, bit for bit")


if __name__ == "__main__":
    main()
