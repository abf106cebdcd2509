#!/usr/bin/env python3
"""What PyTorch's FSDP2 answers to the programs of tests/dist/fsdp_*_test.cpp (backward, in_place, dropped, recompute,
parameters, outliving).

    bench/fsdp2_answers.py [--ranks N]     (under any Python with torch; five minutes, most of them waits)

Each program runs on N Gloo ranks of its own, compared with the same module unsharded whose gradients (or parameters, of a
program that returns these) are averaged over the ranks. Prints one line a program: the largest difference over the
largest value, the error, or that it hung for a minute.
"""

import argparse
import gc

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from local_ranks import ask_ranks

WIDTH = 5


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x.relu_())


class InPlaceOfAView(InPlace):
    def forward(self, x):
        x.narrow(1, 0, 2).mul_(2.0)
        return self.linear(x)


class Keeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        self.kept = self.linear(x)
        return self.kept


class Hooked(Cell):
    def __init__(self):
        super().__init__()
        self.linear.weight.register_hook(lambda grad: grad * 2)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.left, self.right = Cell(), Cell(), Cell()

    def forward(self, x):
        y = self.trunk(x)
        return self.left(y), self.right(y)


class Residual(nn.Module):
    def __init__(self, block=InPlace):
        super().__init__()
        self.first, self.block = nn.Linear(WIDTH, WIDTH), block()

    def forward(self, x):
        y = self.first(x)
        return y + self.block(y)


def data(rank, i):
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * rank + i))


def retained(model, rank):
    h1 = model(data(rank, 0))
    loss1 = h1.square().sum()
    loss1.backward(retain_graph=True)
    model(h1).square().sum().backward()


def plain_step(model, rank):
    model(data(rank, 0)).square().sum().backward()


def change_of_a_kept_result(model, rank):
    y = model(data(rank, 0))
    y.mul_(2.0)
    (y.square().sum() + model.kept.square().sum()).backward()


def grad_through_checkpoint(model, rank):
    x = data(rank, 0).requires_grad_()
    y = checkpoint(model, x, use_reentrant=True).square().sum()
    torch.autograd.grad(y, x)


def some(rank, i, both):
    left, right = (one.square().sum() for one in both)
    return left if rank == i % 2 else left + right


def dropped_two_backwards(model, rank):
    losses = [some(rank, i, model(data(rank, i))) for i in range(2)]
    for loss in losses:
        loss.backward()


def dropped_one_backward(model, rank):
    losses = [some(rank, i, model(data(rank, i))) for i in range(2)]
    sum(losses).backward()


def dropped_forward(model, rank):
    first, second = model(data(rank, 0)), model(data(rank, 1))
    loss = sum(one.square().sum() for one in first)
    if rank != 0:
        loss = loss + sum(one.square().sum() for one in second)
    loss.backward()


def of_both(both):
    return sum(one.square().sum() for one in both)


# These take the model out of the list, which holds it alone.
def optimizer_outlives(models, rank):
    model = models.pop()
    values = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    of_both(model(data(rank, 0))).backward()
    del model
    gc.collect()
    optimizer.step()
    return values


def inner_outlives(models, rank):
    model = models.pop()
    inner = model.left
    of_both(model(data(rank, 0))).backward()
    model.zero_grad()
    del model
    gc.collect()
    inner(data(rank, 1)).square().sum().backward()
    return {name: parameter.grad for name, parameter in inner.named_parameters()}


PROGRAMS = {
    "a backward over a retained forward and a newer one": (Cell, retained),
    "a block that changes its argument in place": (Residual, plain_step),
    "a block that changes a view of its argument": (lambda: Residual(InPlaceOfAView), plain_step),
    "a kept result that its caller changes in place": (Keeping, change_of_a_kept_result),
    "autograd.grad through a checkpoint": (Cell, grad_through_checkpoint),
    "a hook on a parameter before sharding": (Hooked, plain_step),
    "a dropped branch, two forwards, two backwards": (Branches, dropped_two_backwards),
    "a dropped branch, two forwards, one backward": (Branches, dropped_one_backward),
    "a forward that one rank does not use": (Branches, dropped_forward),
    "an optimizer that outlives its model": (Branches, optimizer_outlives),
    "an inner module that outlives the outer one": (Branches, inner_outlives),
}
OUTLIVING = (optimizer_outlives, inner_outlives)


def gradients(model):
    return {name: torch.zeros(parameter.shape) if parameter.grad is None else parameter.grad
            for name, parameter in model.named_parameters()}


def run_once(program, models, rank):
    if program in OUTLIVING:
        found = program(models, rank)
    else:
        program(models[0], rank)
        found = gradients(models[0])
    return {name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().double()
            for name, value in found.items()}


def run(rank, say, ranks, name):
    mesh = init_device_mesh("cpu", (ranks,))
    make, program = PROGRAMS[name]
    expected = {}
    for other in range(ranks):
        torch.manual_seed(7)
        plain = make().double()
        for module in plain.modules():
            module.register_forward_pre_hook(lambda _, inputs: tuple(x.double() for x in inputs))
        models = [plain]
        del plain
        try:
            found = run_once(program, models, other)
        except RuntimeError as error:
            if rank == 0:
                say(f"unsharded: {error}")
            return
        for key, value in found.items():
            expected[key] = expected.get(key, 0) + value / ranks
    torch.manual_seed(7)
    model = make()
    for child in model.children():
        if not isinstance(child, nn.Linear):
            fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)
    models = [model]
    del model
    for step in range(1 if program in OUTLIVING else 2):
        models[0].zero_grad()
        found = run_once(program, models, rank)
        worst = max(float((found[key] - value).abs().max() / (value.abs().max() + 1e-30))
                    for key, value in expected.items())
        if rank == 0:
            say(f"step {step}: {worst:.1e} off")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    print(f"torch {torch.__version__}, {ranks} ranks", flush=True)
    for name in PROGRAMS:
        print(f"{name}: {'; '.join(ask_ranks(run, (ranks, name), ranks))}", flush=True)


if __name__ == "__main__":
    main()
