#!/usr/bin/env python3
"""What PyTorch's FSDP2 makes of gradients in several dtypes (docs/numerics.md, 256, 1, -256; docs/fsdp2.md).

    bench/fsdp2_sums.py     (under any Python with torch; a minute)

Prints a table of the sums of three micro-batches, which is 1 where nothing is lost, and one line a program: "right"
where every gradient is that of the same module unsharded, averaged over the ranks; what differs; or the error. Gloo
ranks, two of them, four for replicas and tensor parallelism.
"""

import functools
import sys

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Partial, Replicate, distribute_tensor
from torch.func import functional_call

from local_ranks import ask_ranks

FP32, BF16 = torch.float32, torch.bfloat16
UNSET = "unset"
WIDTH = 8
FINE = 2.0 ** -10  # 1 + FINE is exact in fp32, 1 in bf16
VALUES = (256.0, 1.0, -256.0)  # 256 + 1 is 256 in bf16

# Stored, compute, reduce.
ROWS = ((FP32, BF16, None), (FP32, BF16, FP32), (BF16, BF16, FP32), (BF16, None, FP32), (FP32, None, BF16),
        (BF16, BF16, None), (BF16, None, None))
GRAD_DTYPES = (UNSET, FP32, None)
SYNCED, UNSYNCED, DEFERRED = "synced each", "no sync", "replicas deferred"


def text(dtype):
    return {FP32: "fp32", BF16: "bf16", None: "none"}.get(dtype, dtype)


class Scale(nn.Module):
    def __init__(self, dtype, grad_dtype=UNSET):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=dtype))
        if grad_dtype != UNSET:
            self.weight.grad_dtype = grad_dtype

    def forward(self, x):
        return self.weight * x


def bring(values, backward, model, schedule=UNSYNCED):
    """One backward a value, reduced as the schedule says."""
    for i, value in enumerate(values):
        last = i + 1 == len(values)
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(last or schedule != UNSYNCED)
            model.set_requires_all_reduce(last or schedule != DEFERRED)
        backward(model, value)


def scaled_by(dtype):
    return lambda model, value: model(torch.full((WIDTH,), value, dtype=dtype)).sum().backward()


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def table(rank, say, schedules):
    mesh = (init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
            if DEFERRED in schedules else init_device_mesh("cpu", (2,)))
    for row in ROWS:
        storage, compute, reduce = row
        for grad_dtype in GRAD_DTYPES:
            for schedule in schedules:
                try:
                    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
                    model = fully_shard(Scale(storage, grad_dtype), mesh=mesh, mp_policy=policy)
                    bring(VALUES, scaled_by(compute or storage), model, schedule)
                    found = f"{float(whole(model.weight.grad)[0]):g}"
                except Exception as error:
                    found = f"{type(error).__name__}: {error}"
                if rank == 0:
                    say("|".join((*map(text, row), text(grad_dtype), schedule, found)))


def print_table():
    cells, remarks = {}, []
    for schedules, ranks in (((SYNCED, UNSYNCED), 2), ((DEFERRED,), 4)):
        for line in ask_ranks(table, (schedules,), ranks):
            *place, found = line.split("|", 5)
            if len(place) < 5 or not found.lstrip("-").isdigit():
                remarks.append(line.replace("|", " / "))
                found = "-"
            cells[tuple(place)] = found
    print(f"{', '.join(f'{value:g}' for value in VALUES)}: {SYNCED}, {UNSYNCED}, {DEFERRED} (2 x 2 ranks)\n")
    print(f"| stored / compute / reduce | {' | '.join(f'`grad_dtype` {text(one)}' for one in GRAD_DTYPES)} |")
    print("|---" * (1 + len(GRAD_DTYPES)) + "|")
    for row in ROWS:
        names = tuple(map(text, row))
        columns = [" ".join(cells.get((*names, text(one), schedule), "-") for schedule in (SYNCED, UNSYNCED, DEFERRED))
                   for one in GRAD_DTYPES]
        print(f"| {' / '.join(names)} | {' | '.join(columns)} |")
    print("\n" + "\n".join([*remarks, ""]), flush=True)


def gradients(model):
    return {name: torch.zeros(parameter.shape) if parameter.grad is None else whole(parameter.grad)
            for name, parameter in model.named_parameters()}


def cast_backward(compute):
    """One unsharded backward of a model whose parameters compute in the dtype that `compute` gives by name."""
    def backward(model, *arguments):
        cast = {name: parameter.to(compute(name, parameter)) for name, parameter in model.named_parameters()}
        functional_call(model, cast, arguments).sum().backward()
    return backward


class Mixed(nn.Module):
    """The model of pytorch issue 156784: fp32 layers and a bf16 one in one unit."""

    def __init__(self):
        super().__init__()
        self.layer1, self.layer2 = nn.Linear(10, 20), nn.Linear(20, 30)
        self.layer3 = nn.Linear(30, 10).to(BF16)

    def forward(self, x, target):
        y = self.layer1(x.to(self.layer1.weight.dtype)).relu()
        y = self.layer3(self.layer2(y).relu().to(BF16)).float()
        return nn.functional.mse_loss(y, target.float())


def mixed(compute, policy, rank, ranks):
    def rows(one):
        return torch.randn(2, 4, 10, generator=torch.Generator().manual_seed(one)).to(BF16).float()

    def run(one, change, backward):
        torch.manual_seed(7)
        model = change(Mixed())
        backward(model, *rows(one))
        return gradients(model)

    plain = [run(one, lambda model: model, cast_backward(compute)) for one in range(ranks)]
    right = {name: (sum(found[name].double() for found in plain) / ranks).to(value.dtype)
             for name, value in plain[0].items()}
    settings = policy()
    return run(rank, lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)), mp_policy=settings),
               lambda model, *arguments: model(*arguments).backward()), right


class Two(nn.Module):
    """Two parameters of one unit, whose gradients are the values that the micro-batches bring."""

    def __init__(self, dtype=FP32):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones(WIDTH, dtype=dtype)) for _ in range(2))

    def forward(self, x, uses_second):
        y = (self.first * x.to(self.first.dtype)).float()
        return (y + (self.second * x.to(self.second.dtype)).float() if uses_second else y).sum()


def two(values, second_in, rank, ranks, *, policy, set_up=None, reduces_unused=False):
    """Gradients of `values` micro-batches, the last alone reduced; the second parameter's in those of `second_in`."""
    def backward(model, i):
        model(torch.full((WIDTH,), values[i]), i in second_in).backward()

    def run(change):
        model = Two(BF16 if set_up else FP32)
        if set_up:
            set_up(model)
        model = change(model)
        if reduces_unused and hasattr(model, "set_reduce_scatter_unused_params"):
            model.set_reduce_scatter_unused_params(True)
        bring(range(len(values)), backward, model)
        return gradients(model)

    mesh = init_device_mesh("cpu", (ranks,))
    return run(lambda model: fully_shard(model, mesh=mesh, mp_policy=policy)), run(lambda model: model)


def compute_bf16():
    return MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)


def wide_in_a_unit(rank, ranks):
    """A parameter of fp32 among those of bf16, whose gradient needs fp32 values."""
    class Squares(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.narrow = (nn.Parameter(torch.full((WIDTH,), 1 + FINE)) for _ in range(2))

        def forward(self):
            return self.wide.square().sum() + self.narrow.square().sum().float()

    model = Squares()
    wide = model.wide
    settings = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32,
                                    param_dtype_override_fn=lambda one: FP32 if one is wide else None)
    plain = Squares()
    cast_backward(lambda name, _: FP32 if name == "wide" else BF16)(plain)
    model = fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)), mp_policy=settings)
    model().backward()
    return gradients(model), gradients(plain)


def grad_dtype_of_one(rank, ranks):
    def set_up(model):
        model.first.grad_dtype = FP32
    return two(VALUES, range(3), rank, ranks, policy=MixedPrecisionPolicy(), set_up=set_up)


def used_last(rank, ranks):
    return two(VALUES, (2,), rank, ranks, policy=compute_bf16())


def never_used(rank, ranks):
    return two(VALUES, (), rank, ranks, policy=compute_bf16(), reduces_unused=True)


def unfrozen(rank, ranks):
    """256 of one rank and 1 of the other, whose sum a bf16 wire rounds."""
    model = Scale(FP32).requires_grad_(False)
    model = fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)), mp_policy=compute_bf16())
    scale = torch.full((WIDTH,), VALUES[rank])
    model(scale)
    model.requires_grad_(True)
    model(scale).float().sum().backward()
    return gradients(model), {"weight": torch.full((WIDTH,), sum(VALUES[:ranks]) / ranks)}


def replicated_over_tp(storage, grad_dtype, values, rank, ranks):
    """A weight that both tp ranks hold: its gradient is 1 of one and 2^-10 of the other, over the micro-batches."""
    class OfTp(Scale):
        def forward(self, x):
            return self.weight.to_local(grad_placements=[Partial()]) * x

    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    model = OfTp(storage)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["tp"], [Replicate()]))
    if grad_dtype != UNSET:
        model.weight.grad_dtype = grad_dtype
    model = fully_shard(model, mesh=mesh["dp"], mp_policy=compute_bf16())
    part = FINE if rank % 2 else 1.0
    bring([part * value for value in values], scaled_by(BF16), model)
    return gradients(model), {"weight": torch.full((WIDTH,), (1 + FINE) * sum(values))}


def override():
    return MixedPrecisionPolicy(param_dtype=BF16, param_dtype_override_fn=lambda one: one.dtype,
                                cast_forward_inputs=False)


def over_tp(*arguments):
    return functools.partial(replicated_over_tp, *arguments), 4


# Each with its number of ranks.
PROGRAMS = {
    "fp32 and bf16 layers stored in one unit": (
        functools.partial(mixed, lambda _, one: one.dtype, MixedPrecisionPolicy), 2),
    "the same with a policy, all in bf16": (functools.partial(mixed, lambda *_: BF16, compute_bf16), 2),
    "the same, each overridden to its stored dtype": (functools.partial(mixed, lambda _, one: one.dtype, override), 2),
    "one parameter computes in fp32 in a bf16 unit stored in fp32": (wide_in_a_unit, 2),
    "one parameter of a bf16 unit with grad_dtype fp32": (grad_dtype_of_one, 2),
    "a parameter first used in the last micro-batch": (used_last, 2),
    "a parameter never used, set_reduce_scatter_unused_params": (never_used, 2),
    "a model unfrozen after its first forward": (unfrozen, 2),
    "a weight on both tp ranks, fp32": over_tp(FP32, UNSET, (1.0,)),
    "the same, accumulated": over_tp(FP32, UNSET, (0.0, 1.0)),
    "a weight on both tp ranks, bf16": over_tp(BF16, UNSET, (1.0,)),
    "the same, accumulated, bf16": over_tp(BF16, UNSET, (0.0, 1.0)),
    "a weight on both tp ranks, bf16 with grad_dtype fp32": over_tp(BF16, FP32, (1.0,)),
    "the same, accumulated, bf16 with grad_dtype fp32": over_tp(BF16, FP32, (0.0, 1.0)),
}


def judged(found, right):
    wrong = []
    for name, value in right.items():
        apart = (found[name].double() - value.double()).abs().flatten()
        at = int(apart.argmax())
        if apart[at] > 1e-6 * float(value.double().abs().max()):
            wrong.append(f"{name}: {found[name].flatten()[at]:.10g} for {value.flatten()[at]:.10g}")
    return "; ".join(wrong) or "right"


def run(rank, say, ranks, names):
    for name in names:
        try:
            answer = judged(*PROGRAMS[name][0](rank, ranks))
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        if rank == 0:
            say(f"{name}: {answer}")


def print_programs():
    for ranks in (2, 4):
        names = [name for name, (_, count) in PROGRAMS.items() if count == ranks]
        lines = ask_ranks(run, (ranks, names), ranks)
        missing = [name for name in names if not any(line.startswith(f"{name}: ") for line in lines)]
        print("\n".join(lines + [f"{name}: not reached" for name in missing]), flush=True)


def main():
    if len(sys.argv) > 1:
        sys.exit(__doc__.strip())
    print(f"torch {torch.__version__}\n", flush=True)
    print_table()
    print_programs()


if __name__ == "__main__":
    main()
