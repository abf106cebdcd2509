#!/usr/bin/env python3
"""Attention, MLP or experts, loss and head alone on one GPU, Tessera's compared with PyTorch's.

    python3 bench/device_parts.py [--program PROGRAM] [--rounds 2] [--steps 20] [--model dense moe]
    python3 bench/device_parts.py --device cpu --size tiny        (both sides and the table, no GPU)

The parts of the models that bench/device_compare.py trains, in bf16, forward and backward, 2 rows of
4096 tokens: `scores` (softmax and its two products), `attention` (projections, norms of heads, rope
and scores), `mlp` or `experts` (with router and order), `loss` (of logits that stay) and `head`
(norm, product, loss). PROGRAM is build/release/bench/device_parts, linked against this Python's
torch; PyTorch's side are the modules of bench/device_torch.py. Both draw the same values.

Each side runs all parts of a model in a process of its own, in turns, and each is first in every
second round; the first 5 steps are not counted. Milliseconds lie between events of the device. Peak
is the most that a step takes beyond weights and inputs, with all gradients. Exit code 1 when a side
failed, 3 when the norm of a result or of a gradient differs by more than 2 %, 77 without torch.
"""

import argparse
import importlib.util
import json
import pathlib
import statistics
import sys
import time

from device_compare import OURS, ROOT, Budget, Failed, environment, machine, run, shown
from device_shapes import INITIAL_DEVIATION, SHAPES, WARM_UP_STEPS

THEIRS = "PyTorch"
NORM_TOLERANCE = 2e-2  # one rounding to bf16 is 0.4 %; tokens between two experts may change sides


def modules(shape, device, rows):
    """name -> (module, inputs by name, gradient of the result) of PyTorch's side, one at a time."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    import device_torch

    def drawn(part, name, size):
        return device_torch.initial(f"{part}.{name}", size, device)

    def given(part, name, *size):
        return drawn(part, name, (rows, shape.sequence, *size)).div_(INITIAL_DEVIATION)

    class Scores(nn.Module):
        def forward(self, q, k, v):
            heads = (rows, shape.sequence, -1, shape.head_dim)
            q, k, v = (each.view(heads).transpose(1, 2) for each in (q, k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return mixed.transpose(1, 2).reshape(rows, shape.sequence, -1)

    class Loss(nn.Module):
        def forward(self, logits):
            return device_torch.mean_loss(logits.float(), labels)

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = device_torch.Norm(shape.hidden, shape.eps)
            self.lm_head = device_torch.linear(shape.hidden, shape.vocabulary)

        def forward(self, x):
            return device_torch.mean_loss(self.lm_head(self.norm(x)).float(), labels)

    def filled(part, make):
        with torch.device("meta"):
            module = make()
        for name, parameter in list(module.named_parameters()):
            owner, _, last = name.rpartition(".")
            setattr(module.get_submodule(owner), last,
                    nn.Parameter(drawn(part, name, parameter.shape)))
        return module

    labels = device_torch.batches(shape, 1, rows)[0].to(device)
    turns = device_torch.rope_tables(shape, device)
    keys, queries = shape.key_heads * shape.head_dim, shape.heads * shape.head_dim
    yield ("scores", Scores(), {"q": given("scores", "q", queries), "k": given("scores", "k", keys),
                                "v": given("scores", "v", keys)}, given("scores", "grad", queries))
    of_stream = {"attention": lambda: device_torch.Attention(shape)}
    if shape.experts:
        of_stream["experts"] = lambda: device_torch.Experts(shape)
    else:
        of_stream["mlp"] = lambda: device_torch.Mlp(shape)
    for part, make in of_stream.items():
        module = filled(part, make)
        if part == "attention":
            module.forward = lambda x, of=module.forward: of(x, *turns)
        yield (part, module, {"x": given(part, "x", shape.hidden)}, given(part, "grad", shape.hidden))
        del module
    yield "loss", Loss(), {"logits": given("loss", "logits", shape.vocabulary)}, None
    yield "head", filled("head", Head), {"x": given("head", "x", shape.hidden)}, None


def measure(module, inputs, grad, device, steps):
    import torch

    from device_torch import Clock

    on_card = device.type == "cuda"
    leaves = {**{name: value.requires_grad_() for name, value in inputs.items()},
              **dict(module.named_parameters())}
    if on_card:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    clock = Clock(device)
    for _ in range(WARM_UP_STEPS + steps):
        for leaf in leaves.values():
            leaf.grad = None
        clock.mark()
        y = module(**inputs)
        clock.mark()
        y.backward(grad)
        clock.mark()
        del y
    ms = clock.milliseconds()
    found = {"forward_ms": ms[::3][WARM_UP_STEPS:], "backward_ms": ms[1::3][WARM_UP_STEPS:]}
    if on_card:
        found["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    # Formed behind the peak, as on our side: they need memory of their own.
    y = module(**inputs).detach()
    found["norms"] = {"result": (y if grad is None else y.float().norm()).item(),
                      **{name: leaf.grad.float().norm().item() for name, leaf in leaves.items()}}
    return found


def run_here(arguments):
    """PyTorch's side of one model, as JSON."""
    import torch

    device = torch.device(arguments.device, *([0] if arguments.device == "cuda" else []))
    shape = SHAPES[arguments.size][arguments.model[0]]
    found = {part: measure(module, inputs, grad, device, arguments.steps)
             for part, module, inputs, grad in modules(shape, device, arguments.rows)}
    print(json.dumps({"torch": torch.__version__, "parts": found}))


class Bench:
    def __init__(self, arguments, model):
        self.arguments, self.model = arguments, model
        self.shape = SHAPES[arguments.size][model]

    def run_tessera(self, seconds):
        arguments = self.arguments
        arguments.folder.mkdir(parents=True, exist_ok=True)
        config = arguments.folder / f"parts-{arguments.size}-{self.model}.json"
        config.write_text(json.dumps(self.shape.config_json()))
        lines, _ = run([arguments.program, config, arguments.device, arguments.rows,
                        self.shape.sequence, arguments.steps], seconds,
                       environment(arguments.device))
        return {"parts": json.loads(lines[-1])}

    def run_torch(self, seconds):
        arguments = self.arguments
        lines, _ = run([sys.executable, __file__, "--here", "--model", self.model, "--size",
                        arguments.size, "--device", arguments.device, "--rows", arguments.rows,
                        "--steps", arguments.steps], seconds)
        return json.loads(lines[-1])

    def side(self, name):
        return {OURS: self.run_tessera, THEIRS: self.run_torch}[name]


def run_model(budget, bench):
    """By side what its rounds found; a side that fails has no further ones."""
    results = {OURS: {"rounds": [], "failed": ""}, THEIRS: {"rounds": [], "failed": ""}}
    for number in range(bench.arguments.rounds):
        for name in list(results) if number % 2 == 0 else list(results)[::-1]:
            found = results[name]
            if found["failed"]:
                continue
            try:
                found["rounds"].append(budget.run((bench.model, name), bench.side(name)))
                said = f"{budget.taken[bench.model, name]:.0f} s"
            except (Failed, ValueError, OSError) as error:
                said = found["failed"] = str(error)
            print(f"{bench.model}, {name}: {said}", file=sys.stderr, flush=True)
    return results


def summary(found, part):
    """Medians of the rounds' medians, in ms; None where no round has the part."""
    rounds = [result["parts"][part] for result in found["rounds"] if part in result["parts"]]
    if not rounds:
        return None
    row = {key: statistics.median(statistics.median(each[key]) for each in rounds)
           for key in ("forward_ms", "backward_ms")}
    row["ms"] = row["forward_ms"] + row["backward_ms"]
    row["peak_mib"] = max((each["peak_mib"] for each in rounds if "peak_mib" in each), default=None)
    return row


def norms_agree(model, results):
    agree = True
    first = [found["rounds"][0]["parts"] for found in results.values() if found["rounds"]]
    for part in first[0] if len(first) == 2 else ():
        ours, theirs = (side[part]["norms"] for side in first)
        if ours.keys() != theirs.keys():
            print(f"{model}, {part}: found norms of {', '.join(ours)}, expected those of "
                  f"{', '.join(theirs)}", file=sys.stderr)
            agree = False
            continue
        for name, norm in ours.items():
            # Not a number agrees with nothing.
            if not abs(norm - theirs[name]) <= NORM_TOLERANCE * abs(theirs[name]):
                print(f"{model}, {part}: norm of {name}: found {norm:.6g}, expected "
                      f"{theirs[name]:.6g}", file=sys.stderr)
                agree = False
    return agree


def print_table(arguments, results):
    """Last, so that the end of a long log has it. Returns the exit code and the rows."""
    versions = {result["torch"] for sides in results.values() for found in sides.values()
                for result in found["rounds"] if "torch" in result}
    print(f"\n{time.strftime('%Y-%m-%d')}; {machine()}; torch {', '.join(sorted(versions)) or '-'}; "
          f"{arguments.rounds} rounds of {arguments.steps} steps behind {WARM_UP_STEPS}; "
          f"{arguments.rows} rows; ms: ours, {THEIRS}'s")
    code, table = 0, {}
    for model, sides in results.items():
        if not norms_agree(model, sides):
            code = 3
        for name, found in sides.items():
            if found["failed"]:
                code = code or 1
                told = found["failed"].splitlines()
                print(f"{model}, {name}: " + " ... ".join(told[:1] + told[1:][-1:]))
    print(f"\n{'':18}{'forward':>18}{'backward':>18}{'both':>18}{'speed':>8}{'peak MiB':>18}")
    for model, sides in results.items():
        for part in dict.fromkeys(part for found in sides.values() for result in found["rounds"]
                                  for part in result["parts"]):
            rows = [summary(found, part) for found in sides.values()]
            table[f"{model}, {part}"] = dict(zip(sides, rows))

            def pair(key, digits):
                return "".join(f"{shown(row and row[key], digits):>9}" for row in rows)

            speed = rows[1]["ms"] / rows[0]["ms"] if all(rows) else None
            print(f"{model + ', ' + part:18}{pair('forward_ms', 3)}{pair('backward_ms', 3)}"
                  f"{pair('ms', 3)}{shown(speed, 3):>8}{pair('peak_mib', 0)}")
    return code, table


def parsed():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", nargs="+", choices=SHAPES["full"], default=list(SHAPES["full"]))
    parser.add_argument("--size", choices=SHAPES, default="full")
    parser.add_argument("--program", type=pathlib.Path,
                        default=ROOT / "build/release/bench/device_parts",
                        help="default: build/release/bench/device_parts")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20, help="that are counted")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--limit", type=float, default=150, help="seconds in all")
    parser.add_argument("--run-limit", type=float, default=60, help="seconds of one run")
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "build/bench/device")
    parser.add_argument("--json", type=pathlib.Path, help="also write everything here")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.program = arguments.program.resolve()
    if not arguments.here and not arguments.program.is_file():
        parser.error(f"--program: {arguments.program} is not there; build it, or name another")
    if min(arguments.rounds, arguments.steps, arguments.rows) < 1:
        parser.error("--rounds, --steps, --rows: at least 1")
    return arguments


def main():
    arguments = parsed()
    if importlib.util.find_spec("torch") is None:
        print("device_parts: skipped: this Python has no torch", file=sys.stderr)
        return 77
    if arguments.here:
        return run_here(arguments)
    budget = Budget(arguments)
    results = {model: run_model(budget, Bench(arguments, model))
               for model in dict.fromkeys(arguments.model)}
    code, table = print_table(arguments, results)
    if arguments.json:
        arguments.json.write_text(json.dumps({"summary": table, "results": results}))
    return code


if __name__ == "__main__":
    sys.exit(main())
