#!/usr/bin/env python3
"""PyTorch's side of build/release/bench/pipeline_actions: what one action of a schedule costs
in addition to its computing, in torch.distributed.pipelining.

    .venv/bin/python bench/pipeline_actions.py [KIND] [ranks] [micro-batches] [steps]

Stages of one addition over 16 numbers, 1 thread a rank, Gloo. One line of JSON: median, 10th and
90th percentile over steps, in microseconds of one F or B (an I with its W counts as a B) of rank 0.
The first tenth of the steps is not counted. The loss squares because c10d's Gloo does not send the
expanded gradient of a bare sum.
"""

import argparse
import json
import time

import local_ranks
import pipeline_compare


def measure(arguments):
    import torch
    from torch import nn

    class Empty(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16))

        def forward(self, x):
            return x + self.weight

    local_ranks.join(arguments)
    stages = pipeline_compare.stages_of(arguments.kind, arguments.rank, arguments.ranks)
    schedule = pipeline_compare.new_schedule(arguments.kind, {stage: Empty() for stage in stages},
                                             arguments.ranks, arguments.micro_batches,
                                             lambda outputs, _: outputs.square().sum())
    last = pipeline_compare.KINDS[arguments.kind][1] * arguments.ranks - 1
    inputs = [torch.ones(arguments.micro_batches, 16)] if 0 in stages else []
    target = torch.zeros(arguments.micro_batches, 1) if last in stages else None
    actions = 2 * len(stages) * arguments.micro_batches
    times = []
    for _ in range(arguments.steps):
        start = time.perf_counter()
        schedule.step(*inputs, target=target, losses=[] if last in stages else None,
                      return_outputs=False)
        times.append(1e6 * (time.perf_counter() - start) / actions)
    times = sorted(times[arguments.steps // 10:])
    local_ranks.report(arguments, {name: times[int(share * (len(times) - 1))] for name, share in
                                   (("median_us", 0.5), ("p10_us", 0.1), ("p90_us", 0.9))})
    local_ranks.leave(arguments)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=pipeline_compare.KINDS, default="ZBV")
    parser.add_argument("pipeline_ranks", nargs="?", type=int, default=1)
    parser.add_argument("micro_batches", nargs="?", type=int, default=8)
    parser.add_argument("steps", nargs="?", type=int, default=200)
    local_ranks.add_rank_arguments(parser)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        return measure(arguments)
    passed = [arguments.kind, arguments.pipeline_ranks, arguments.micro_batches, arguments.steps]
    ranks = local_ranks.run_ranks(__file__, passed, arguments.pipeline_ranks)
    print(json.dumps(ranks[0]))


if __name__ == "__main__":
    main()
