#!/usr/bin/env python3
"""transformers' side of bench/delta_rule: torch_chunk_gated_delta_rule on the same sizes.

    .venv/bin/python bench/delta_rule.py [ROUNDS] [POSITIONS] [THREADS]

Prints one line of JSON as bench/delta_rule.cpp does.
"""

import json
import resource
import statistics
import sys
import time

KEY_HEADS, HEADS, HEAD_DIM = 16, 32, 128


def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(rounds, positions, threads):
    import torch
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    inputs = [torch.randn(1, positions, KEY_HEADS, HEAD_DIM), torch.randn(1, positions, KEY_HEADS, HEAD_DIM),
              torch.randn(1, positions, HEADS, HEAD_DIM), torch.rand(1, positions, HEADS) * -0.2,
              torch.rand(1, positions, HEADS)]
    for x in inputs:
        x.requires_grad_()
        x.grad = torch.zeros_like(x)
    grad = torch.randn(1, positions, HEADS, HEAD_DIM)
    before, forward, backward = peak_mib(), [], []
    for _ in range(rounds):
        start = time.perf_counter()
        out, _ = torch_chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)
        forward.append(1e3 * (time.perf_counter() - start))
        start = time.perf_counter()
        out.backward(grad)
        backward.append(1e3 * (time.perf_counter() - start))
        del out
    return {"forward": round(statistics.median(forward), 1),
            "backward": round(statistics.median(backward), 1), "mib": round(peak_mib() - before)}


if __name__ == "__main__":
    rounds, positions, threads = (int(x) for x in (sys.argv[1:] + ["5", "2048", "2"][len(sys.argv) - 1:]))
    print(json.dumps(measure(rounds, positions, threads)))
