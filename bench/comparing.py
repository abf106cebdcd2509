"""What the comparisons of this folder share: our side's runs, rounds in which sides take turns, and
medians, ratios and losses of neighbours in time."""

import json
import os
import pathlib
import statistics
import subprocess
import sys

import fsdp2_compare as torch_side
import local_ranks

ROOT = pathlib.Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".venv/bin/python"
PROGRAM = ROOT / "build/release/tessera"
RANKS = 2
FOLDERS = {"dense": "qwen3-19m", "moe": "qwen3-moe-47m"}

# The two sides add in other orders in bf16, and the weights drift apart with every step: the first
# loss differs by rounding only (bf16 eps is 0.8 %, averaged over 1020 tokens), the later ones more.
FIRST_LOSS_TOLERANCE, LOSS_TOLERANCE = 2e-3, 2e-2

CONFIG = """\
[model]
path = "{folder}/model"
[data]
path = "{folder}/batches.safetensors"
[training]
steps = {steps}
local_batch_size = {rows}
max_norm = {max_norm}
[activation_checkpoint]
mode = "{recompute}"
[precision]
param_dtype = "bfloat16"
reduce_dtype = "float32"
[optimizer]
name = "AdamW"
lr = {lr}
betas = [{betas[0]}, {betas[1]}]
eps = {eps}
weight_decay = {weight_decay}
[metrics]
log_freq = 1000
enable_tensorboard = false
[checkpoint]
enable = false
"""


def use_venv():
    """The script that calls this continues with ./test's packages, where they are."""
    if pathlib.Path(sys.prefix).resolve() != PYTHON.parent.parent.resolve() and PYTHON.exists():
        os.execv(PYTHON, [str(PYTHON), *sys.argv])


def output_of(command):
    done = subprocess.run(list(map(str, command)), stdin=subprocess.DEVNULL, cwd=ROOT, text=True,
                          env=local_ranks.quiet_environment(), stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE)
    if done.returncode:
        raise SystemExit(f"{pathlib.Path(sys.argv[0]).name}: {' '.join(map(str, command))} ended "
                         f"with {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout


def write_config(settings, recompute="none"):
    """Of `settings` folder, steps and rows count."""
    config = settings.folder / "tessera.toml"
    config.write_text(CONFIG.format(folder=settings.folder, steps=settings.steps,
                                    rows=settings.rows, recompute=recompute,
                                    max_norm=torch_side.MAX_NORM, **torch_side.OPTIMIZER))
    return config


def train_tessera(settings, recompute, name, *options, shard=RANKS, program=PROGRAM):
    """Trains in a new run folder, which is returned."""
    run = settings.folder / "runs" / f"{os.getpid()}-{name}"
    subprocess.run([program, "train", write_config(settings, recompute), "--nproc", str(RANKS),
                    "--parallelism.data_parallel_shard_degree", str(shard),
                    "--job.dump_folder", run, *options], env=local_ranks.quiet_environment(),
                   stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd=ROOT, check=True)
    return run


def measured(run):
    """What the run in this folder wrote of its steps."""
    lines = [json.loads(line) for line in (run / "metrics/metrics.jsonl").read_text().splitlines()]
    return {"step_ms": [line["step_ms"] for line in lines],
            "loss": [line["loss"] for line in lines],
            "recorded_calls": [line.get("recorded_calls", 0) for line in lines],
            "peak_rss_mib": [max(line["peak_rss_mib"] for line in lines)]}


def in_turns(rounds, cases, what):
    """Results of `cases`, (side, case) -> function of the round, by side and case. Every second
    round begins with the other end of the sides."""
    found = {key: [] for key in cases}
    sides = list(dict.fromkeys(side for side, _ in cases))
    for number in range(rounds):
        for case in dict.fromkeys(case for _, case in cases):
            for side in sides if number % 2 == 0 else reversed(sides):
                if (side, case) in cases:
                    found[side, case].append(cases[side, case](number))
            named = case if isinstance(case, str) else ', '.join(map(str, case))
            print(f"{what}: round {number + 1} of {rounds}, {named}",
                  file=sys.stderr, flush=True)
    return found


def counted(result):
    return result["step_ms"][torch_side.WARM_UP_STEPS:]


def summary(name, rounds):
    times = sorted(value for result in rounds for value in counted(result))
    medians = [statistics.median(counted(result)) for result in rounds]
    return {"side": name, "median_ms": statistics.median(times),
            "p10_ms": times[len(times) // 10], "p90_ms": times[-1 - len(times) // 10],
            "round_medians_ms": [round(value, 1) for value in medians],
            "peak_rss_mib": statistics.median(max(result["peak_rss_mib"]) for result in rounds),
            "round_rss_mib": [round(max(result["peak_rss_mib"])) for result in rounds]}


def table_head(width):
    return (f"{'':{width}}{'median ms':>10}{'p10':>8}{'p90':>8}{'peak RSS MiB':>14}   "
            "rounds: medians; RSS")


def table_row(name, row, width):
    return (f"{name:{width}}{row['median_ms']:10.0f}{row['p10_ms']:8.0f}{row['p90_ms']:8.0f}"
            f"{row['peak_rss_mib']:14.0f}   {row['round_medians_ms']}; {row['round_rss_mib']}")


def ratio(over, under, key):
    """Median, least and largest ratio of neighbours in time."""
    ratios = [a / b for a, b in zip(over[key], under[key])]
    return statistics.median(ratios), min(ratios), max(ratios)


def aim(text, is_met):
    return f"aim {text}{'' if is_met else ', missed'}"


def losses_near(name, theirs, ours):
    """Whether the two sides are apart by rounding only."""
    apart = [abs(a - b) for a, b in zip(theirs, ours)]
    print(f"losses, {name}: {theirs[0]:.5f} and {ours[0]:.5f} at step 1, {theirs[-1]:.5f} and "
          f"{ours[-1]:.5f} at step {len(ours)}, at most {max(apart):.5f} apart")
    is_near = (len(theirs) == len(ours) and apart[0] <= FIRST_LOSS_TOLERANCE
               and max(apart) <= LOSS_TOLERANCE)
    if not is_near:
        print(f"the losses disagree, {name}", file=sys.stderr)
    return is_near
