#!/usr/bin/env python3
"""PyTorch's side of bench/unit_overhead: what a unit costs that computes almost nothing.

    .venv/bin/python bench/unit_overhead.py [--units 200] [--steps 20]

200 x Linear(64, 64), each its own FSDP2 unit (gathered in forward, again in backward, reduced once),
on 2 Gloo ranks with one thread each, fp32; in comparison, in the same process and in turns, the bare
c10d collectives of the same sizes: two all-gathers and one reduce-scatter a unit. Prints one line of
JSON with medians in ms a unit and step.
"""

import argparse
import json
import statistics
import time

import local_ranks

WIDTH, ROWS = 64, 32


def timed(action, barrier):
    barrier()
    start = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - start)


def measure(arguments):
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    local_ranks.join(arguments)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (arguments.ranks,))
    plain = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(arguments.units)))
    sharded = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(arguments.units)))
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    rows = torch.randn(ROWS, WIDTH)

    def train(model):
        model(rows).sum().backward()
        for parameter in model.parameters():
            parameter.grad = None

    group = dist.group.WORLD
    numel = WIDTH * WIDTH + WIDTH
    whole, shard = torch.zeros(numel), torch.zeros(numel // arguments.ranks)

    def collectives():
        for _ in range(2 * arguments.units):
            group._allgather_base(whole, shard).wait()
        for _ in range(arguments.units):
            group._reduce_scatter_base(shard, whole).wait()

    actions = {"fsdp2": lambda: train(sharded), "collectives": collectives,
               "unsharded": lambda: train(plain)}
    times = {name: [] for name in actions}
    for index in range(arguments.steps + 2):
        for name, action in actions.items():
            spent = timed(action, dist.barrier)
            if index >= 2:
                times[name].append(spent / arguments.units)
    local_ranks.report(arguments, times)
    local_ranks.leave(arguments)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=200)
    parser.add_argument("--steps", type=int, default=20)
    local_ranks.add_rank_arguments(parser)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        return measure(arguments)
    ranks = local_ranks.run_ranks(__file__, ["--units", arguments.units, "--steps", arguments.steps],
                                  arguments.ranks)
    slowest = {name: [max(values) for values in zip(*(rank[name] for rank in ranks))]
               for name in ranks[0]}
    print(json.dumps({"units": arguments.units, **{
        f"{name}_ms": round(statistics.median(values), 4) for name, values in slowest.items()}}))


if __name__ == "__main__":
    main()
