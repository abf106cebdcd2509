#!/usr/bin/env python3
"""Writes tests/golden/data/muon/*.f32: what torch.optim.Muon and AdamW make of parameters in 100 steps.

Values and gradients are those of a formula that tests/dist/muon_test.cpp has, too, so that only results
are stored: of each case its parameters, one after the other, after steps 1, 10 and 100, float32. The
iteration runs in float32: torch's own casts to bfloat16, which is taken out here and nothing else.

  .venv/bin/python tests/golden/muon_reference.py tests/golden/data/muon
"""

import pathlib
import sys

import numpy
import torch

STEPS = 100
STORED = (1, 10, 100)
SHAPES = ((24, 40), (40, 24), (16, 16), (3, 16, 20), (32,))
CASES = {
    "original": dict(lr=0.02, momentum=0.95, nesterov=True, weight_decay=0.1, adjust_lr_fn="original"),
    "match_rms": dict(lr=3e-3, momentum=0.9, nesterov=False, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
}


def values(shape, step, number):
    """Multiples of 2^-24 in [-0.5, 0.5), by a 32-bit mixer (lowbias32)."""
    count = int(numpy.prod(shape))
    with numpy.errstate(over="ignore"):
        x = numpy.arange(count, dtype=numpy.uint32)
        x += numpy.uint32((step * 2654435761 + number * 40503) % 2**32)
        x ^= x >> numpy.uint32(16)
        x *= numpy.uint32(0x7FEB352D)
        x ^= x >> numpy.uint32(15)
        x *= numpy.uint32(0x846CA68B)
        x ^= x >> numpy.uint32(16)
    mixed = (x >> numpy.uint32(8)).astype(numpy.float64) / 2**24 - 0.5
    return torch.from_numpy(mixed.astype(numpy.float32)).view(shape)


def run(options):
    parameters = [torch.nn.Parameter(values(shape, 0, n)) for n, shape in enumerate(SHAPES)]
    # Each matrix of a stack is one: a parameter of its own, over the same memory.
    matrices, parts = [], []
    for n, parameter in enumerate(parameters):
        if parameter.dim() == 1:
            continue
        pieces = parameter.data.unbind(0) if parameter.dim() == 3 else [parameter.data]
        for piece_number, piece in enumerate(pieces):
            matrices.append(torch.nn.Parameter(piece))
            parts.append((n, piece_number if parameter.dim() == 3 else None))
    muon = torch.optim.Muon(matrices, **options)
    rest = [parameter for parameter in parameters if parameter.dim() == 1]
    adamw = torch.optim.AdamW(
        rest, lr=options["lr"], betas=(0.9, 0.95), eps=1e-8, weight_decay=options["weight_decay"]
    )
    stored = []
    for step in range(1, STEPS + 1):
        gradients = [values(shape, step, n) for n, shape in enumerate(SHAPES)]
        for matrix, (n, part) in zip(matrices, parts):
            matrix.grad = gradients[n] if part is None else gradients[n][part]
        for parameter, gradient in zip(parameters, gradients):
            if parameter.dim() == 1:
                parameter.grad = gradient
        muon.step()
        adamw.step()
        if step in STORED:
            stored += [parameter.detach().reshape(-1).numpy().copy() for parameter in parameters]
    return numpy.concatenate(stored)


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    torch.Tensor.bfloat16 = lambda self: self.float().clone()
    for name, options in CASES.items():
        run(options).astype("<f4").tofile(folder / f"{name}.f32")


main()
