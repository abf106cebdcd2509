#!/usr/bin/env python3
"""What PyTorch's FSDP2 answers to the programs of tests/dist/fsdp_{backward,in_place,dropped,recompute}_test.cpp.

    bench/fsdp2_answers.py [--ranks N]     (needs ./test's packages; two minutes)

Each program runs on N Gloo ranks of its own, beside the same module unsharded whose gradients are averaged
over the ranks. Prints one line a program: the largest difference over the largest gradient, the error, or that
it hung for a minute.
"""

import argparse
import datetime
import multiprocessing as mp
import os
import socket
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

WIDTH = 5
SECONDS = 30


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


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.left, self.right = Cell(), Cell(), Cell()

    def forward(self, x):
        y = self.trunk(x)
        return self.left(y), self.right(y)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.block = nn.Linear(WIDTH, WIDTH), InPlace()

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


def in_place(model, rank):
    model(data(rank, 0)).square().sum().backward()


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


PROGRAMS = {
    "a backward over a retained forward and a newer one": (Cell, retained),
    "a block that changes its argument in place": (Residual, in_place),
    "autograd.grad through a checkpoint": (Cell, grad_through_checkpoint),
    "a dropped branch, two forwards, two backwards": (Branches, dropped_two_backwards),
    "a dropped branch, two forwards, one backward": (Branches, dropped_one_backward),
    "a forward that one rank does not use": (Branches, dropped_forward),
}


def gradients(model):
    result = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is None:
            grad = torch.zeros(parameter.shape)
        result[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return result


def say(answers, text):
    with open(answers, "a", encoding="utf-8") as out:
        out.write(text.replace("\n", " ")[:160] + "\n")


def run(rank, ranks, port, name, answers):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=SECONDS))
    mesh = init_device_mesh("cpu", (ranks,))
    make, program = PROGRAMS[name]
    expected = {}
    for other in range(ranks):
        torch.manual_seed(7)
        plain = make().double()
        try:
            program(lambda x, plain=plain: plain(x.double()), other)
        except RuntimeError as error:
            if rank == 0:
                say(answers, f"unsharded: {error}")
            os._exit(0)  # without waiting for ranks that hang
        for key, value in gradients(plain).items():
            expected[key] = expected.get(key, 0) + value / ranks
    torch.manual_seed(7)
    model = make()
    for child in model.children():
        if not isinstance(child, nn.Linear):
            fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)
    try:
        for step in range(2):
            model.zero_grad()
            program(model, rank)
            found = gradients(model)
            worst = max(float((found[key].double() - value).abs().max() / (value.abs().max() + 1e-30))
                        for key, value in expected.items())
            if rank == 0:
                say(answers, f"step {step}: {worst:.1e} off")
    except BaseException as error:
        say(answers, f"rank {rank}: {type(error).__name__}: {error}")
    os._exit(0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    context = mp.get_context("spawn")
    for name in PROGRAMS:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with tempfile.NamedTemporaryFile("r", encoding="utf-8") as answers:
            processes = [context.Process(target=run, args=(rank, ranks, port, name, answers.name))
                         for rank in range(ranks)]
            for process in processes:
                process.start()
            end = time.monotonic() + 2 * SECONDS
            for process in processes:
                process.join(max(0, end - time.monotonic()))
            hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
            for rank in hung:
                processes[rank].kill()
            found = answers.read().splitlines() + [f"rank {rank} hung" for rank in hung]
        print(f"{name}: {'; '.join(found)}", flush=True)


if __name__ == "__main__":
    main()
