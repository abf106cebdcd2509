#!/usr/bin/env python3
"""PyTorch's side of bench/state_space: transformers' scan of Mamba-2 without kernels of the hub.

    .venv/bin/python bench/state_space.py [ROUNDS [THREADS]]

Sizes of state_space.cpp. Prints one line of JSON, medians of forward and backward in ms by chunk.
"""

import json
import statistics
import sys
import time

POSITIONS, HEADS, HEAD_DIM, GROUPS, STATE = 2048, 64, 64, 8, 128


def measure(rounds, threads):
    import torch
    from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

    torch.set_num_threads(threads)
    torch.manual_seed(1)
    leaves = [values.requires_grad_(True) for values in (
        torch.randn(1, POSITIONS, HEADS, HEAD_DIM), torch.rand(1, POSITIONS, HEADS) * 0.1,
        -torch.linspace(1, 16, HEADS), torch.randn(1, POSITIONS, GROUPS, STATE),
        torch.randn(1, POSITIONS, GROUPS, STATE), torch.randn(HEADS))]
    x, dt, a, b, c, d = leaves
    grad = torch.randn_like(x)
    medians = {}
    for chunk in (64, 128, 256):
        times = []
        for _ in range(rounds + 1):
            begin = time.perf_counter()
            y = mamba2_chunk_scan(x, dt, a, b, c, chunk, D=d)
            then = time.perf_counter()
            y.backward(grad)
            times.append((then - begin, time.perf_counter() - then))
        medians[chunk] = [1e3 * statistics.median(part) for part in zip(*times[1:])]
    return medians


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:]] + [3, 1][len(sys.argv) - 1:]
    print(json.dumps(measure(*given)))
