#!/usr/bin/env python3
"""PyTorch's side of bench/grouped_products: the same products by transformers' grouped experts.

    .venv/bin/python bench/grouped_products.py [ROUNDS]

transformers' own `_grouped_linear` (torch.nn.functional.grouped_mm), its gradients by autograd, one
thread. Splits and order as in grouped_products.cpp. Prints one line of JSON, medians in us.
"""

import json
import statistics
import sys
import time

EXPERTS, MEAN_ROWS = 16, 128
ROWS = EXPERTS * MEAN_ROWS
PARTS = ("forward", "input gradient", "weight gradient")
SPLITS, UNEVEN_SPLITS = 15, 3  # the last ones are "uneven", the others never seen
COUNTS = [a for a in range(1, MEAN_ROWS) if a % 16 != 0]


def even_rows():
    return [MEAN_ROWS] * EXPERTS


def uneven_rows(number):
    """Of an expert: pairs of a and 256 - a, no count of another split, no multiple of 16."""
    counts = []
    for pair in range(EXPERTS // 2):
        fewer = COUNTS[(number * EXPERTS // 2 + pair) * 37 % len(COUNTS)]
        counts += [fewer, 2 * MEAN_ROWS - fewer]
    return counts


def measure(rounds):
    import torch
    from transformers.integrations.moe import _grouped_linear

    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = {}

    def us(action):
        start = time.perf_counter()
        result = action()
        return 1e6 * (time.perf_counter() - start), result

    def once(product, counts):
        x, weight, grad = product
        ends = torch.tensor(counts).cumsum(0).to(torch.int32)
        forward, y = us(lambda: _grouped_linear(x, weight, ends))
        return [forward] + [us(lambda: torch.autograd.grad(y, of, grad, retain_graph=True))[0]
                            for of in (x, weight)]

    def turn(dtype, products, rows, counts):
        for name, product in products.items():
            for part, spent in zip(PARTS, once(product, counts)):
                found.setdefault(f"{dtype}, {rows}, {name} {part}", []).append(spent)

    for dtype in ("bfloat16", "float32"):
        def made(inputs, outputs):
            kind = getattr(torch, dtype)
            return (torch.randn(ROWS, inputs).to(kind).requires_grad_(),
                    torch.randn(EXPERTS, outputs, inputs).mul(0.05).to(kind).requires_grad_(),
                    torch.randn(ROWS, outputs).to(kind))
        products = {"gate_up": made(384, 512), "down": made(256, 384)}
        uneven = [uneven_rows(number) for number in range(SPLITS - UNEVEN_SPLITS, SPLITS)]
        for counts in [even_rows(), *uneven]:
            for product in products.values():
                once(product, counts)
        for index in range(rounds):
            turn(dtype, products, "even", even_rows())
            turn(dtype, products, "uneven", uneven[index % UNEVEN_SPLITS])
        # At the end: so many products drive others out of oneDNN's cache.
        for number in range(SPLITS - UNEVEN_SPLITS):
            turn(dtype, products, "never seen", uneven_rows(number))
    return {name: round(statistics.median(spent), 1) for name, spent in found.items()}


if __name__ == "__main__":
    print(json.dumps({"us": measure(int(sys.argv[1]) if len(sys.argv) > 1 else 20)}))
