#!/usr/bin/env python3
"""The door in Python (docs/python.md) compared with PyTorch's FSDP2, on the same Python models.

    bench/python_compare.py [--rounds 5] [--steps 25] [--only qwen3 moe units python] [--json FILE]
    bench/python_compare.py --fsdp2-python OTHER/bin/python      (FSDP2 of another torch; it needs transformers, too)

Needs ./test's packages and the target `tessera_python` of build/release (for `python` its `unit_overhead`, too).
Ranks are processes with one thread each, over Gloo; the two sides take turns, every second round from the other end,
because on a shared machine only neighbours in time can be compared. A step is forward, backward, clipping, AdamW and
zero_grad. The cases:

    qwen3    transformers' Qwen3, 18.9 M parameters, a unit a layer and the root: fp32, 256 tokens a rank
    moe      its Qwen3-MoE, 47 M, experts by grouped products
    units    200 x Linear(64, 64), a unit each
    python   the program of `units` without its optimizer, in Python and in C++ (bench/unit_overhead): what Python adds

Printed are medians of the slower rank's steps and their ratio by round (median, least, largest), what each rank's
memory grows by at its peak, beyond what it held once everything was imported and the plain model was built, and how far
the losses are apart. Both sides have an allocator that keeps its pages (local_ranks.py); `--allocator default` leaves
glibc's. `--optimizer torch` steps with torch.optim.AdamW on our shards instead of tessera.AdamW. `--profile` adds where
the steps of rank 0 go, by torch's profiler. Exit code 3 when losses disagree.
"""

import argparse
import gc
import json
import os
import pathlib
import statistics
import sys
import time

import comparing
import fsdp2_compare
import local_ranks

SIDES = ("fsdp2", "tessera")
ALONE = "plain"
MODELS = ("qwen3", "moe")
CASES = (*MODELS, "units", "python")
AIMS = {"qwen3": (1.4, 0.7), "moe": (1.4, 0.7), "units": (4.0, None)}  # times FSDP2's speed, of its memory
UNITS, WIDTH, UNIT_ROWS = 200, 64, 32
LOSS_TOLERANCE = 2e-4  # fp32: sums in other orders, over the steps of a run
MODULE = comparing.ROOT / "build/release/python"
UNIT_OVERHEAD = comparing.ROOT / "build/release/bench/unit_overhead"


# What a rank runs, under either interpreter.


class FSDP2:
    """PyTorch's side: `fully_shard` of this interpreter's torch."""

    def __init__(self, arguments):
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        self.torch, self.fully_shard = torch, fully_shard
        self.mesh = init_device_mesh("cpu", (arguments.ranks,))
        self.policy = MixedPrecisionPolicy(param_dtype=param_dtype(arguments), reduce_dtype=torch.float32)

    def shard(self, module):
        return self.fully_shard(module, mesh=self.mesh, mp_policy=self.policy)

    def optimizer(self, model):
        return self.torch.optim.AdamW(model.parameters(), fused=True, **fsdp2_compare.OPTIMIZER)

    def clip(self, model):
        self.torch.nn.utils.clip_grad_norm_(model.parameters(), fsdp2_compare.MAX_NORM)

    def close(self):
        pass


class Tessera:
    """Our side: the same calls, by tessera's names."""

    def __init__(self, arguments):
        import tessera
        import torch
        self.torch, self.tessera, self.own = torch, tessera, arguments.optimizer == "own"
        self.world = tessera.init()
        self.policy = tessera.MixedPrecisionPolicy(param_dtype=param_dtype(arguments), reduce_dtype=torch.float32)

    def shard(self, module):
        return self.tessera.fully_shard(module, mp_policy=self.policy)

    def optimizer(self, model):
        if self.own:
            return self.tessera.AdamW(model, **fsdp2_compare.OPTIMIZER)
        return self.torch.optim.AdamW(model.parameters(), fused=True, **fsdp2_compare.OPTIMIZER)

    def clip(self, model):
        self.tessera.clip_grad_norm_(model, fsdp2_compare.MAX_NORM)

    def close(self):
        self.world.close()


class Plain:
    """The model by itself, which no rank communicates for: what both sides would take if sharding were free."""

    def __init__(self, arguments):
        import torch
        self.torch = torch

    def shard(self, module):
        return module

    def optimizer(self, model):
        return self.torch.optim.AdamW(model.parameters(), fused=True, **fsdp2_compare.OPTIMIZER)

    def clip(self, model):
        self.torch.nn.utils.clip_grad_norm_(model.parameters(), fsdp2_compare.MAX_NORM)

    def close(self):
        pass


def param_dtype(arguments):
    import torch
    return None if arguments.param_dtype == "float32" else getattr(torch, arguments.param_dtype)


def resident(key):
    """VmRSS or VmHWM of this process in MiB."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key + ":")) / 1024


def forget_peak():
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def plain_model(case):
    """The model, the modules that become units, and a function from a step's number to its loss of the model."""
    import torch
    torch.manual_seed(0)
    if case not in MODELS:
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)))
        rows = torch.randn(UNIT_ROWS, WIDTH)
        return model, list(model), lambda _: model(rows).square().mean()
    model = fsdp2_compare.new_model("dense" if case == "qwen3" else "moe").float()
    if case == "moe":
        model.set_experts_implementation("grouped_mm")
    return model.train(), list(model.model.layers), None


def token_loss(model, arguments):
    """As `plain_model`'s: fixed random tokens, other ones for each rank and step."""
    import torch
    drawn = torch.Generator().manual_seed(1)
    shape = (arguments.steps, arguments.ranks, arguments.rows, fsdp2_compare.SEQUENCE)
    ids = torch.randint(0, fsdp2_compare.VOCABULARY, shape, generator=drawn)[:, arguments.rank]
    return lambda index: model(input_ids=ids[index % len(ids)], labels=ids[index % len(ids)]).loss


def measure(arguments):
    """One rank of one side: times, losses and memory."""
    import torch
    import torch._dynamo  # torch.optim does when it is first used; memory is looked at afterwards
    import torch.distributed as dist
    if arguments.case in MODELS:
        import transformers  # noqa: F401
    local_ranks.join(arguments)
    side = {"fsdp2": FSDP2, "tessera": Tessera, ALONE: Plain}[arguments.side](arguments)
    model, units, loss_of = plain_model(arguments.case)
    loss_of = loss_of or token_loss(model, arguments)
    gc.collect()
    before = resident("VmRSS")
    forget_peak()

    for unit in units:
        side.shard(unit)
    side.shard(model)
    optimizer = side.optimizer(model) if arguments.case != "python" else None
    clock = time.perf_counter
    parts = {"forward": [], "backward": [], "optimizer": []}

    def step(index):
        start = clock()
        loss = loss_of(index)
        computed = clock()
        loss.backward()
        reduced = clock()
        if optimizer:
            side.clip(model)
            optimizer.step()
        for parameter in model.parameters() if optimizer is None else ():
            parameter.grad = None
        if optimizer:
            optimizer.zero_grad()
        for name, spent in zip(parts, (computed - start, reduced - computed, clock() - reduced)):
            parts[name].append(1e3 * spent)
        return loss.detach()

    losses, milliseconds, held = [], [], []
    for index in range(arguments.steps):
        dist.barrier()
        start = clock()
        losses.append(step(index))
        milliseconds.append(1e3 * (clock() - start))
        held.append(resident("VmRSS") - before)
    peak = resident("VmHWM") - before
    losses = torch.stack(losses)
    dist.all_reduce(losses)
    counted = {name: statistics.median(values[fsdp2_compare.WARM_UP_STEPS:]) for name, values in parts.items()}
    result = {"step_ms": milliseconds, "parts_ms": counted, "loss": (losses / arguments.ranks).tolist(),
              "before_mib": before, "peak_mib": peak, "held_mib": held, "torch": torch.__version__}
    if arguments.profile:
        result["shares"] = fsdp2_compare.where_time_goes(step, 5)
    local_ranks.report(arguments, result)
    dist.barrier()
    if arguments.side == "fsdp2":
        local_ranks.leave(arguments)
    side.close()
    dist.destroy_process_group()


# What starts them.


def run_side(arguments, case, side):
    """The slower rank's steps, the larger memory, the mean loss."""
    passed = ["--case", case, "--side", side, "--steps", arguments.steps, "--rows", arguments.rows,
              "--param-dtype", arguments.param_dtype, "--optimizer", arguments.optimizer]
    environment = local_ranks.quiet_environment()
    if arguments.allocator == "default":
        environment = {name: value for name, value in environment.items() if not name.startswith("MALLOC_")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(MODULE), environment.get("PYTHONPATH"))))
    python = arguments.fsdp2_python if side == "fsdp2" and arguments.fsdp2_python else sys.executable
    ranks = local_ranks.run_ranks(__file__, passed + ["--profile"] * arguments.profile, arguments.ranks, python,
                                  environment, f"{side}, {case}")
    return {**ranks[0], "step_ms": [max(times) for times in zip(*(rank["step_ms"] for rank in ranks))],
            "peak_mib": max(rank["peak_mib"] for rank in ranks),
            "before_mib": max(rank["before_mib"] for rank in ranks)}


def run_unit_overhead(arguments):
    """The same units in C++."""
    line = json.loads(comparing.output_of([UNIT_OVERHEAD, UNITS, arguments.steps]))
    return {"step_ms": [UNITS * line["tessera_ms"]] * arguments.steps, "peak_mib": 0.0}


def row_of(rounds):
    medians = [statistics.median(comparing.counted(result)) for result in rounds]
    times = sorted(value for result in rounds for value in comparing.counted(result))
    return {"median_ms": statistics.median(times), "p10_ms": times[len(times) // 10],
            "p90_ms": times[-1 - len(times) // 10], "round_medians_ms": medians,
            "round_peaks_mib": [result["peak_mib"] for result in rounds]}


def say_row(name, row, rounds):
    parts = rounds[0].get("parts_ms", {})
    each = ", ".join(f"{part} {statistics.median(r['parts_ms'][part] for r in rounds):.0f}" for part in parts)
    print(f"{name:30}{row['median_ms']:10.1f}{row['p10_ms']:9.1f}{row['p90_ms']:9.1f}"
          f"{statistics.median(row['round_peaks_mib']):12.0f}   {each}")


def compare(case, found):
    """Prints what the case shows; returns whether the losses agree, and the case's numbers."""
    theirs, ours = (row_of(found[side, case]) for side in SIDES)
    for side, row in zip(SIDES, (theirs, ours)):
        say_row(f"{case}, {side}", row, found[side, case])
    if (ALONE, case) in found:
        say_row(f"{case}, {ALONE}", row_of(found[ALONE, case]), found[ALONE, case])
    speed = comparing.ratio(theirs, ours, "round_medians_ms")
    memory = comparing.ratio(ours, theirs, "round_peaks_mib")
    times, share = AIMS[case]
    print(f"{case}: {speed[0]:.2f}x FSDP2's speed ({speed[1]:.2f} to {speed[2]:.2f}; "
          f"{comparing.aim(f'{times}', speed[0] >= times)}), {memory[0]:.2f} of its memory ({memory[1]:.2f} to "
          f"{memory[2]:.2f}{'; ' + comparing.aim(f'{share}', memory[0] <= share) if share else ''})")
    apart = max(abs(a - b) for a, b in zip(found["fsdp2", case][0]["loss"], found["tessera", case][0]["loss"]))
    print(f"{case}: losses at most {apart:.1e} apart")
    for side in SIDES:
        for name, value in found[side, case][-1].get("shares", {}).items():
            print(f"  {side} {name:26}" + (f"{100 * value:6.1f} %" if value <= 1 else f"{value:8.1f}"))
    return apart <= LOSS_TOLERANCE, {"fsdp2": theirs, "tessera": ours, "speed": speed, "memory": memory, "apart": apart}


def python_itself(found):
    """What Python adds to a unit and step, in microseconds."""
    in_cpp, in_python = (row_of(found[side, "python"]) for side in ("C++", "tessera"))
    added = [1e3 * (a - b) / UNITS for a, b in zip(in_python["round_medians_ms"], in_cpp["round_medians_ms"])]
    print(f"python: {1e3 * in_python['median_ms'] / UNITS:.0f} us a unit and step in Python, "
          f"{1e3 * in_cpp['median_ms'] / UNITS:.0f} in C++; Python adds {statistics.median(added):.0f} "
          f"({min(added):.0f} to {max(added):.0f})")
    return {"python": in_python, "C++": in_cpp, "added_us": added}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=25, help="of a round; the first 5 are not counted")
    parser.add_argument("--rows", type=int, default=1, help="of 256 tokens, a rank and step")
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--param-dtype", choices=fsdp2_compare.DTYPES, default="float32")
    parser.add_argument("--optimizer", choices=("own", "torch"), default="own")
    parser.add_argument("--allocator", choices=("tuned", "default"), default="tuned")
    parser.add_argument("--fsdp2-python", type=pathlib.Path, help="the interpreter of FSDP2's side")
    parser.add_argument("--plain", action="store_true", help="also the model unsharded, in fp32, in every round")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=pathlib.Path, help="also write everything here")
    parser.add_argument("--case", choices=CASES, help="set by the launcher")
    parser.add_argument("--side", choices=(*SIDES, ALONE), help="set by the launcher")
    local_ranks.add_rank_arguments(parser)
    arguments = parser.parse_args()
    if arguments.steps <= fsdp2_compare.WARM_UP_STEPS:
        parser.error(f"--steps: the first {fsdp2_compare.WARM_UP_STEPS} are not counted")
    if arguments.rank is not None:
        measure(arguments)
        return 0

    comparing.use_venv()
    cases = {(side, case): lambda _, case=case, side=side: run_side(arguments, case, side)
             for case in arguments.only if case != "python" for side in (*SIDES, *[ALONE] * arguments.plain)}
    if "python" in arguments.only:
        cases["C++", "python"] = lambda _: run_unit_overhead(arguments)
        cases["tessera", "python"] = lambda _: run_side(arguments, "python", "tessera")
    # One case is finished before the next begins, so that its sides are neighbours in time.
    found, told, agree = {}, {}, True
    for case in arguments.only:
        mine = {key: run for key, run in cases.items() if key[1] == case}
        found |= comparing.in_turns(arguments.rounds, mine, "python_compare")
    versions = ", ".join(f"{side}: torch {found[side, case][0]['torch']}" for side, case in found if side in SIDES
                         and case == arguments.only[0])
    print(f"{versions}; {arguments.ranks} ranks, {arguments.param_dtype}, allocator {arguments.allocator}, "
          f"optimizer of ours: {arguments.optimizer}")
    print(f"{'':30}{'median ms':>10}{'p10':>9}{'p90':>9}{'peak + MiB':>12}   parts, median ms")
    for case in arguments.only:
        if case == "python":
            told[case] = python_itself(found)
        else:
            near, told[case] = compare(case, found)
            agree = agree and near
    if arguments.json:
        arguments.json.write_text(json.dumps({
            "summary": told, "rounds": {f"{side}, {case}": rounds for (side, case), rounds in found.items()}}))
    if not agree:
        print("the losses disagree", file=sys.stderr)
    return 0 if agree else 3


if __name__ == "__main__":
    sys.exit(main())
