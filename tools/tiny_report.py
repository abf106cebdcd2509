#!/usr/bin/env python3
"""Closes ./run: expected and obtained figures side by side, the losses drawn by step, some lines that
the model writes, the run folder, what to try next.

    tools/tiny_report.py CONFIG RUN [overrides that were given to tessera train]

The yardstick is the byte-frequency model: it gives every byte the share that it has in the training
text (one more of each, so that none is impossible), independent of what came before. Exit code 3 when the
trained model is not clearly better on the held-out text. Standard library only.
"""

import collections
import json
import math
import pathlib
import subprocess
import sys
import textwrap
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROGRAM = "build/release/tessera"
if not pathlib.Path(PROGRAM).is_file():  # an installed copy's share/tessera is ROOT
    PROGRAM = str(ROOT.parents[1] / "lib/tessera/tessera")
PROMPT = "It is a truth "
CLEARLY_NATS = 0.3
LEAST_RANGE_NATS = 0.1  # of a plot: a narrower one would show rounding as a curve
SYMBOLS, END_OF_DOCUMENT = 257, 256


def counts(paths):
    """How often each byte stands in the text: a file, a folder of .txt, or a list of them."""
    total = collections.Counter()
    files = []
    for path in map(pathlib.Path, [paths] if isinstance(paths, str) else paths):
        files += sorted(path.glob("*.txt")) if path.is_dir() else [path]
    for name in files:
        total.update(name.read_bytes())
        total[END_OF_DOCUMENT] += 1
    return total


def byte_frequency_loss(train, held_out):
    """Mean negative log-likelihood, in nats a byte, of the held-out text."""
    seen, wanted = counts(train), counts(held_out)
    whole = sum(seen.values()) + SYMBOLS
    return sum(n * -math.log((seen[symbol] + 1) / whole)
               for symbol, n in wanted.items()) / sum(wanted.values())


def loss_plot(training, held_out, reference, columns=64, rows=12):
    """The lines of a plot of two {step: loss}, not both empty, and of a constant loss; plain ASCII, as
    not every terminal has UTF-8.

    A column shows the mean of its steps. Losses that are not finite are left out, not their steps:
    a run that diverges ends in empty columns.
    """
    first, last = min([*training, *held_out]), max([*training, *held_out])

    def column(step):
        return round((step - first) * (columns - 1) / max(last - first, 1))

    curves = []
    for series in (training, held_out):
        losses = collections.defaultdict(list)
        for step, loss in series.items():
            if math.isfinite(loss):
                losses[column(step)].append(loss)
        curves.append({at: sum(here) / len(here) for at, here in losses.items()})
    drawn = [loss for curve in curves for loss in curve.values()]
    if not drawn:
        return ["No step has a finite loss: there is nothing to draw."]
    height = max(max(drawn) - min(drawn), LEAST_RANGE_NATS)
    top = (max(drawn) + min(drawn) + height) / 2

    lines = {".": "byte frequencies", "*": "training (mean of a column)", "o": "held-out"}
    dots = {at: reference for at in range(0, columns, 2) if top - height <= reference <= top}
    marks = [(mark, curve) for mark, curve in zip(lines, (dots, *curves)) if curve]
    grid = [[" "] * columns for _ in range(rows)]
    for mark, curve in marks:  # a later one covers an earlier one
        for at, loss in curve.items():
            grid[round((top - loss) / height * (rows - 1))][at] = mark
    values = {row: f"{top - row * height / (rows - 1):#.3g}"
              for row in (round(third * (rows - 1) / 3) for third in range(4))}
    ticks, numbers = ["-"] * columns, [" "] * columns
    for step in (first, (first + last) // 2, last):
        at, number = column(step), str(step)
        start = min(max(at - len(number) // 2, 0), columns - len(number))
        ticks[at], numbers[start:start + len(number)] = "+", number
    width = max(map(len, values.values()))
    return ["nats a byte:  " + "   ".join(f"{mark} {lines[mark]}" for mark, _ in marks),
            *(f"{values.get(row, ''):>{width}} |{''.join(cells)}".rstrip()
              for row, cells in enumerate(grid)),
            f"{'':{width}} +{''.join(ticks)}", f"{'':{width}}  {''.join(numbers)}  step"]


def written_text(checkpoint):
    """What the model adds to PROMPT, whole lines of a terminal's width; "" where it cannot."""
    words = [PROGRAM, "generate", "--model", checkpoint, "--prompt", PROMPT, "--max-new-tokens", "400",
             "--temperature", "0.7", "--seed", "1"]
    done = subprocess.run(words, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        print(done.stderr.decode(errors="replace"), file=sys.stderr)
        return ""
    return textwrap.fill(PROMPT + done.stdout.decode(errors="replace"), 96, initial_indent="  ",
                         subsequent_indent="  ")


def from_here(folder):
    """As one would type it: a run's config.toml has its folders absolute."""
    path, here = pathlib.Path(folder), pathlib.Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def read_metrics(path):
    """One record a step; JSON has null for what is not finite."""
    return [{name: math.nan if value is None else value for name, value in json.loads(line).items()}
            for line in path.read_text().splitlines()]


def main(config, run, overrides):
    settings = tomllib.loads((pathlib.Path(run) / "config.toml").read_text())
    metrics = from_here(settings["metrics"]["folder"])
    checkpoint = from_here(settings["checkpoint"]["folder"])
    expected = json.loads((ROOT / "configs/tiny.expected.json").read_text())[
        pathlib.Path(config).stem]
    lines = read_metrics(metrics / "metrics.jsonl")
    validated = [line for line in lines if "val_loss" in line]
    steps = [line for line in lines if line["step"] > 0]  # 0 is the validation before the first
    if not validated:
        print(f"tiny_report: {metrics}/metrics.jsonl has no val_loss", file=sys.stderr)
        return 3
    frequency = byte_frequency_loss(settings["data"]["path"], settings["validation"]["path"])
    obtained, tolerance = validated[-1]["val_loss"], expected["tolerance"]
    minutes = sum(step["step_ms"] for step in steps) / 60e3

    first, last = steps[:10], steps[-10:]
    rows = [
        ("held-out loss, byte frequencies only", f"{expected['byte_frequency_loss']:.3f}",
         f"{frequency:.3f}"),
        (f"held-out loss, the model after step {validated[-1]['step']}",
         f"{expected['val_loss']:.2f} +- {tolerance:.2f}", f"{obtained:.3f}"),
        ("training loss, mean of the first 10 steps", f"{expected['first_loss']:.2f}",
         f"{sum(s['loss'] for s in first) / len(first):.3f}"),
        ("training loss, mean of the last 10 steps", f"{expected['last_loss']:.2f}",
         f"{sum(s['loss'] for s in last) / len(last):.3f}"),
        ("minutes of training", f"about {expected['minutes']}", f"{minutes:.1f}"),
        ("peak memory of a rank, MiB", f"about {expected['peak_rss_mib']}",
         f"{max(s['peak_rss_mib'] for s in steps):.0f}"),
    ]
    print(f"\n{'(losses in nats a byte)':44}{'expected':>16}{'obtained':>12}")
    for name, wanted, got in rows:
        print(f"{name:44}{wanted:>16}{got:>12}")
    if overrides:
        print(f"The expected figures are those of {config} without {' '.join(overrides)}.")
    elif abs(obtained - expected["val_loss"]) > tolerance:
        print("The held-out loss is outside of what was expected: worth an issue, with the run folder.")
    print("", *loss_plot({s["step"]: s["loss"] for s in steps},
                         {s["step"]: s["val_loss"] for s in validated}, frequency), sep="\n")

    fell = math.isfinite(obtained) and obtained < frequency - CLEARLY_NATS
    print("\nThe model is clearly better than byte frequencies." if fell else
          f"\nThe held-out loss did not fall {CLEARLY_NATS} below byte frequencies.")
    print(f"Run folder: {run}  (config.toml, logs/; {metrics}/, {checkpoint}/)")
    if not (checkpoint / "latest").is_file():
        print("There is no checkpoint to continue from.")
        return 0 if fell else 3
    if text := written_text(checkpoint):
        print(f"\nThe model continues \"{PROMPT}\" (drawn at temperature 0.7):\n\n{text}")
    longer = 2 * settings["training"]["steps"]
    print(f"\nNext:\n"
          f"  {PROGRAM} train {run}/config.toml --nproc 2 --training.steps {longer}   # continues\n"
          f"  {PROGRAM} generate --model {checkpoint} --prompt \"My dear \" --max-new-tokens 300 "
          "--temperature 0.7\n"
          f"  {PROGRAM} convert {checkpoint} {run}/hf   # a folder that transformers loads")
    return 0 if fell else 3


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
