"""Tessera compared with PyTorch FSDP2 on one GPU, each side one rank: bench/fsdp2_compare --device cuda.

    bench/fsdp2_compare --device cuda [--tessera PROGRAM] [--rounds 2] [--steps 20] [--compile]
    bench/fsdp2_compare --device cuda --model moe [--folder DIR] [-- --section.key VALUE ...]
    python3 bench/device_compare.py --device cpu --size tiny      (both sides and the table, no GPU)

Trains a dense model of 1.5 B and one with experts of 2.8 B parameters (bench/device_shapes.py): 2
rows of 4096 tokens a step, the same initial weights and batches, fp32 weights that compute in bf16,
fp32 reduction, clipping, fused AdamW, nothing recomputed. Needs python3 with a torch of the GPU
(bench/device_torch.py is PyTorch's side, eager) and a program that is linked against the same
torch, which finds its libraries in that torch's folder. --compile adds a last run of PyTorch's side
with torch.compile for each layer. What stands behind -- goes to `tessera train`.

The two sides take turns, and each is first in every second round. The first 5 steps of a run are
not counted. A step of PyTorch's side lasts from event to event on the device, without a wait of the
host; one of ours from step line to step line as they arrive here, so what is between steps counts.
A side that fails is left out from then on: the end of what it said is printed, and the other side's
numbers. No run begins that would end after --limit seconds, or lasts more than --run-limit.

MFU is (6 N + 12 L H D T) x tokens/s over the peak of the device, as torchtitan counts it: N
parameters that multiply each token (the embedding does not), L layers, H heads of D, rows of T
tokens, causal attention not halved. Exit code 1 when a side failed, 3 when first loss or norm
disagree.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))
from device_shapes import MAX_NORM, OPTIMIZER, SHAPES, WARM_UP_STEPS  # noqa: E402

OURS, EAGER, COMPILED = "tessera", "FSDP2 eager", "FSDP2 compiled"
SIDES = {"tessera": OURS, "torch": EAGER}
# Of a device, since the steps began: what tensors held at once, and what the allocator took of it,
# free blocks that it keeps included. Both sides are read alike.
PEAKS = ("peak_device_mib", "peak_device_reserved_mib")
LEAST_SPEED, MOST_MEMORY, LEAST_DENSE_MFU = 1.0, 1.0, 0.40

# The same weights and batch, other kernels: in bf16 (eps 0.8 %) a mean over 8190 tokens differs in
# the fourth digit. The norm of all gradients averages less.
FIRST_LOSS_TOLERANCE, FIRST_NORM_TOLERANCE = 2e-3, 2e-2

CONFIG = """\
device = "{device}"
[model]
path = "{folder}/model"
[data]
path = "{folder}/batches.safetensors"
[training]
steps = {steps}
local_batch_size = {rows}
max_norm = {max_norm}
[parallelism]
data_parallel_shard_degree = 1
[activation_checkpoint]
mode = "none"
[precision]
param_dtype = "bfloat16"
reduce_dtype = "float32"
storage_dtype = "float32"
[optimizer]
name = "AdamW"
lr = {lr}
betas = [{betas[0]}, {betas[1]}]
eps = {eps}
weight_decay = {weight_decay}
[metrics]
log_freq = 1
enable_tensorboard = false
[checkpoint]
enable = false
"""


class Failed(Exception):
    """A run that brought no numbers; says why."""


def environment(device):
    """With the folders of this Python's torch, where a program that is linked against it finds its
    libraries."""
    found = importlib.util.find_spec("torch")
    if device != "cuda" or found is None:
        return dict(os.environ)
    torch = pathlib.Path(found.origin).parent
    folders = [torch / "lib", *sorted(torch.parent.glob("nvidia/*/lib"))]
    known = [os.environ["LD_LIBRARY_PATH"]] if os.environ.get("LD_LIBRARY_PATH") else []
    return {**os.environ, "LD_LIBRARY_PATH": ":".join([*known, *map(str, folders)])}


def run(command, seconds, surroundings=None):
    """Runs it in at most so many seconds; returns the lines of its stdout and when each came."""
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen([str(word) for word in command], env=surroundings,
                                       stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                       stderr=errors, text=True, errors="replace",
                                       start_new_session=True)
        except OSError as error:
            raise Failed(f"{command[0]} does not start: {error}") from None
        late = threading.Event()

        def end():
            late.set()
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(seconds, end)
        timer.start()
        lines, moments = [], []
        try:
            for line in process.stdout:
                moments.append(time.perf_counter())
                lines.append(line)
            code = process.wait()
        finally:
            timer.cancel()
            timer.join()
        if code == 0:
            return lines, moments
        errors.seek(0)
        told = errors.read().decode(errors="replace").splitlines() or lines
    why = f"was ended after {seconds:.0f} s" if late.is_set() else f"ended with {code}"
    why = f"{pathlib.Path(str(command[0])).name} {why}"
    if not told:
        raise Failed(f"{why} and said nothing")
    raise Failed("\n".join([f"{why}; the last it said:",
                            *("  " + line.rstrip() for line in told[-15:])]))


class Bench:
    def __init__(self, arguments, model):
        self.arguments, self.model = arguments, model
        self.shape = SHAPES[arguments.size][model]
        self.folder = (arguments.folder / f"{arguments.device}-{arguments.size}-{model}").resolve()
        self.tokens = arguments.rows * self.shape.sequence
        self.runs = 0

    def torch_command(self, *more):
        arguments = self.arguments
        return [sys.executable, ROOT / "bench/device_torch.py", "--folder", self.folder,
                "--model", self.model, "--size", arguments.size, "--device", arguments.device,
                "--steps", arguments.steps, "--rows", arguments.rows, *more]

    def prepare(self, seconds):
        self.folder.mkdir(parents=True, exist_ok=True)
        run(self.torch_command("--write"), seconds)

    def run_torch(self, seconds, *more):
        lines, _ = run(self.torch_command(*more), seconds)
        return json.loads(next(line for line in reversed(lines) if line.startswith("{")))

    def run_compiled(self, seconds):
        return self.run_torch(seconds, "--compile")

    def run_tessera(self, seconds):
        arguments = self.arguments
        config = self.folder / "tessera.toml"
        config.write_text(CONFIG.format(device=arguments.device, folder=self.folder,
                                        steps=arguments.steps, rows=arguments.rows,
                                        max_norm=MAX_NORM, **OPTIMIZER))
        self.runs += 1
        folder = self.folder / f"runs/{os.getpid()}-{self.runs}"
        lines, moments = run([arguments.tessera, "train", config, "--nproc", "1",
                              "--job.dump_folder", folder, *arguments.options],
                             seconds, environment(arguments.device))
        moments = [moment for line, moment in zip(lines, moments) if line.startswith("step:")]
        text = (folder / "metrics/metrics.jsonl").read_text()
        steps = [json.loads(line) for line in text.splitlines()]
        if len(steps) != arguments.steps or len(moments) != arguments.steps:
            raise Failed(f"tessera: found {len(steps)} steps in its metrics and {len(moments)} "
                         f"step lines, expected {arguments.steps}")
        # The first line has none before it; it is not counted anyway.
        result = {"step_ms": [steps[0]["step_ms"],
                              *(1e3 * (b - a) for a, b in zip(moments, moments[1:]))],
                  "loss": [step["loss"] for step in steps],
                  "grad_norm": [step["grad_norm"] for step in steps],
                  "told_step_ms": [step["step_ms"] for step in steps]}
        for key in ("mfu", "tflops", "peak_rss_mib"):
            if key in steps[-1]:
                result[key] = steps[-1][key]
        for key in PEAKS:
            if key in steps[-1]:
                result[key] = max(step[key] for step in steps)
        return result

    def side(self, name):
        return {OURS: self.run_tessera, EAGER: self.run_torch, COMPILED: self.run_compiled}[name]


def counted(result, key="step_ms"):
    return result[key][WARM_UP_STEPS:]


class Budget:
    """What time is left, and what a run of a side takes."""

    def __init__(self, arguments):
        self.arguments, self.start, self.taken = arguments, time.perf_counter(), {}

    def left(self):
        return self.arguments.limit - (time.perf_counter() - self.start)

    def run(self, key, function):
        """Runs it, or raises Failed."""
        before, left = self.taken.get(key, 0), self.left()
        if left < max(before, 5):
            raise Failed(f"left out: {max(left, 0):.0f} s of --limit {self.arguments.limit} are "
                         + (f"left, the last run took {before:.0f} s" if before else "left"))
        begin = time.perf_counter()
        result = function(min(left, self.arguments.run_limit))
        self.taken[key] = time.perf_counter() - begin
        return result


def run_side(budget, bench, name, results):
    """One more round of a side that has not failed."""
    found = results[name]
    if found["failed"]:
        return
    try:
        found["rounds"].append(budget.run((bench.model, name), bench.side(name)))
    except (Failed, OSError, ValueError, LookupError, StopIteration) as error:
        found["failed"] = str(error) if isinstance(error, Failed) else repr(error)
        print(f"{bench.model}, {name}: {found['failed']}", file=sys.stderr, flush=True)
        return
    result = found["rounds"][-1]
    print(f"{bench.model}, {name}: {statistics.median(counted(result)):.1f} ms a step, the run "
          f"{budget.taken[bench.model, name]:.0f} s", file=sys.stderr, flush=True)


def run_model(budget, bench):
    sides = [SIDES[word] for word in dict.fromkeys(bench.arguments.only)]
    results = {name: {"rounds": [], "failed": ""} for name in sides}
    try:
        budget.run((bench.model, "prepare"), bench.prepare)
    except Failed as error:
        for name in sides:
            results[name]["failed"] = f"weights and batches were not written: {error}"
        print(f"{bench.model}: weights and batches: {error}", file=sys.stderr, flush=True)
        return results
    for number in range(bench.arguments.rounds):
        for name in sides if number % 2 == 0 else sides[::-1]:
            run_side(budget, bench, name, results)
    return results


def summary(bench, found):
    """Of a side with at least one round."""
    rounds = [statistics.median(counted(result)) for result in found["rounds"]]
    step = statistics.median(rounds)
    speed = 1e3 * bench.tokens / step
    peaks = {key: [result[key] for result in found["rounds"] if key in result] for key in PEAKS}
    row = {"step_ms": step, "tokens_per_second": speed, "round_step_ms": rounds,
           "tflops": speed * bench.shape.flops_a_token() / 1e12,
           **{key: max(values) if values else None for key, values in peaks.items()}}
    if bench.arguments.device == "cuda":
        row["mfu"] = row["tflops"] / bench.arguments.peak_tflops
    if "told_step_ms" in found["rounds"][0]:
        row["told_step_ms"] = statistics.median(
            statistics.median(counted(result, "told_step_ms")) for result in found["rounds"])
    return row


def met(value, aim, most=False):
    return "met" if (value <= aim if most else value >= aim) else "missed"


def print_next_to(model, rows):
    """Ours compared with the eager side on the device, with the aims."""
    ours, theirs = rows.get(OURS), rows.get(EAGER)
    if ours and theirs:
        ratios = [b / a for a, b in zip(ours["round_step_ms"], theirs["round_step_ms"])]
        speed = statistics.median(ratios)
        print(f"{model}: {speed:.3f}x FSDP2 eager's tokens/s (rounds {min(ratios):.3f} to "
              f"{max(ratios):.3f}; aim {LEAST_SPEED}, {met(speed, LEAST_SPEED)})")
        held, reserved = (ours[key] / theirs[key] if ours[key] and theirs[key] else None
                          for key in PEAKS)
        if held:
            print(f"{model}: {held:.3f} of what FSDP2 eager's tensors held at their peak (aim "
                  f"{MOST_MEMORY}, {met(held, MOST_MEMORY, most=True)}); "
                  f"{shown(reserved, 3)} of what its allocator took")
    if ours and model == "dense" and "mfu" in ours:
        print(f"{model}: MFU {ours['mfu']:.3f} (aim {LEAST_DENSE_MFU}, "
              f"{met(ours['mfu'], LEAST_DENSE_MFU)})")
    if ours:
        print(f"{model}: tessera's own step_ms has a median of {ours['told_step_ms']:.1f}, its "
              f"step lines are {ours['step_ms']:.1f} apart")


def losses_agree(model, results):
    first = [results[name]["rounds"][0] for name in (OURS, EAGER)
             if name in results and results[name]["rounds"]]
    if len(first) < 2:
        return True
    ours, theirs = first
    apart = [abs(a - b) for a, b in zip(ours["loss"], theirs["loss"])]
    norms = ours["grad_norm"][0], theirs["grad_norm"][0]
    print(f"{model}: losses {ours['loss'][0]:.5f} and {theirs['loss'][0]:.5f} at step 1, "
          f"{ours['loss'][-1]:.5f} and {theirs['loss'][-1]:.5f} at step {len(apart)}, at most "
          f"{max(apart):.5f} apart; first norms {norms[0]:.5f} and {norms[1]:.5f}")
    # Not a number agrees with nothing.
    if (apart[0] <= FIRST_LOSS_TOLERANCE
            and abs(norms[0] - norms[1]) <= FIRST_NORM_TOLERANCE * norms[1]):
        return True
    print(f"{model}: the first loss or norm disagrees (at most {FIRST_LOSS_TOLERANCE} and "
          f"{100 * FIRST_NORM_TOLERANCE:.0f} % apart)", file=sys.stderr)
    return False


def shown(value, digits=0):
    return "-" if value is None else f"{value:.{digits}f}"


def machine():
    try:
        asked = "--query-gpu=name,driver_version,power.limit,clocks.max.sm"
        done = subprocess.run(["nvidia-smi", asked, "--format=csv,noheader"], text=True,
                              stdin=subprocess.DEVNULL, capture_output=True, timeout=20)
        return done.stdout.strip().replace("\n", "; ") or "nvidia-smi names no device"
    except (OSError, subprocess.TimeoutExpired):
        return "no nvidia-smi here"


def print_table(arguments, benches, results):
    """Last, so that the end of a long log has it. Returns whether all is well, and the rows."""
    versions = {result["torch"] for sides in results.values() for found in sides.values()
                for result in found["rounds"] if "torch" in result}
    print(f"\n{time.strftime('%Y-%m-%d')}; {machine()}; torch "
          f"{', '.join(sorted(versions)) or '-'}; {arguments.rounds} rounds of {arguments.steps} "
          f"steps, the first {WARM_UP_STEPS} not counted; {arguments.rows} rows a step")
    table, code = {}, 0
    for bench in benches:
        rows = {name: summary(bench, found) for name, found in results[bench.model].items()
                if found["rounds"]}
        table[bench.model] = rows
        if not losses_agree(bench.model, results[bench.model]):
            code = 3
        if arguments.device == "cuda":
            print_next_to(bench.model, rows)
        for name, found in results[bench.model].items():
            if found["failed"]:
                code = code or 1
                told = found["failed"].splitlines()
                print(f"{bench.model}, {name}: " + " ... ".join(told[:1] + told[1:][-1:]))
    print(f"MFU on {arguments.peak_tflops:.0f} TFLOP/s: (6 N + 12 L H D T) x tokens/s; "
          + "; ".join(f"{bench.model}: N {bench.shape.active() / 1e9:.3f} B, "
                      f"L {bench.shape.layers}, H {bench.shape.heads}, D {bench.shape.head_dim}, "
                      f"T {bench.shape.sequence}" for bench in benches))
    print(f"\n{'':24}{'step ms':>10}{'tokens/s':>10}{'TFLOP/s':>9}{'MFU':>7}{'peak MiB':>10}{'reserved':>10}   "
          "rounds: step ms")
    for bench in benches:
        for name, found in results[bench.model].items():
            row = table[bench.model].get(name)
            head = f"{bench.model}, {name}"
            if row is None:
                print(f"{head:24}{'-':>10}{'-':>10}{'-':>9}{'-':>7}{'-':>10}{'-':>10}   failed")
                continue
            print(f"{head:24}{row['step_ms']:10.1f}{row['tokens_per_second']:10.0f}"
                  f"{row['tflops']:9.2f}{shown(row.get('mfu'), 3):>7}"
                  f"{shown(row['peak_device_mib']):>10}"
                  f"{shown(row['peak_device_reserved_mib']):>10}   "
                  f"{[round(value, 1) for value in row['round_step_ms']]}"
                  + (" (then failed)" if found["failed"] else ""))
    return code, table


def parsed(words):
    options = []
    if "--" in words:
        words, options = words[:words.index("--")], words[words.index("--") + 1:]
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", nargs="+", choices=SHAPES["full"], default=list(SHAPES["full"]))
    parser.add_argument("--size", choices=SHAPES, default="full")
    parser.add_argument("--only", nargs="+", choices=SIDES, default=list(SIDES), metavar="SIDE",
                        help="tessera, torch, or both")
    parser.add_argument("--tessera", type=pathlib.Path, default=ROOT / "build/release/tessera",
                        metavar="PROGRAM", help="default: build/release/tessera")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=2, help="of a step")
    parser.add_argument("--compile", action="store_true", help="PyTorch's side compiled, once more")
    parser.add_argument("--limit", type=float, default=230, help="seconds in all")
    parser.add_argument("--run-limit", type=float, default=75, help="seconds of one run")
    parser.add_argument("--peak-tflops", type=float, default=989.0,
                        help="the device's, of dense bf16 products")
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "build/bench/device",
                        help="for weights (3 and 6 GB), batches and runs")
    parser.add_argument("--json", type=pathlib.Path, help="also write everything here")
    arguments = parser.parse_args(words)
    arguments.options = options
    arguments.tessera = arguments.tessera.resolve()
    if "tessera" in arguments.only and not arguments.tessera.is_file():
        parser.error(f"--tessera: {arguments.tessera} is not there; build it, or name another")
    if arguments.steps <= WARM_UP_STEPS:
        parser.error(f"--steps: the first {WARM_UP_STEPS} are not counted")
    if arguments.rounds < 1:
        parser.error("--rounds: at least 1")
    return arguments


def main(words=None):
    arguments = parsed(sys.argv[1:] if words is None else words)
    budget = Budget(arguments)
    benches = [Bench(arguments, model) for model in dict.fromkeys(arguments.model)]
    results = {bench.model: run_model(budget, bench) for bench in benches}
    for bench in benches if arguments.compile else ():
        results[bench.model][COMPILED] = {"rounds": [], "failed": ""}
        run_side(budget, bench, COMPILED, results[bench.model])
    code, table = print_table(arguments, benches, results)
    if arguments.json:
        arguments.json.write_text(json.dumps({"summary": table, "results": results}))
    return code


if __name__ == "__main__":
    sys.exit(main())
