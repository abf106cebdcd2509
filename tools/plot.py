#!/usr/bin/env python3
"""Draws a run: loss (training and held-out), gradient norm, speed, memory, over steps, as one PNG; a dotted
line where the run was resumed, as RUN/logs/rank_0.log says.

    tools/plot.py RUN [OUT.png]        RUN is a run's folder, or a metrics.jsonl; OUT: RUN/metrics.png

Needs matplotlib, which scripts/bootstrap --with-tools puts into .venv; run it with .venv/bin/python
or any Python that has it. Exit code 2 when something is missing.
"""

import os
import sys

# Python looks for modules next to a script first, and tokenize.py here is not Python's own.
sys.path[:] = [place for place in sys.path
               if os.path.abspath(place) != os.path.dirname(os.path.abspath(__file__))]

import json  # noqa: E402
import pathlib  # noqa: E402
import re  # noqa: E402
import statistics  # noqa: E402

LINE, FAINT, HELD_OUT, RESUMED = "#1f5fa8", "#b9cde4", "#c4511d", "#6f6f6f"
# The line that a run logs as each attempt begins.
ATTEMPT = re.compile(r" info (?:\[rank 0\] )?steps +(\d+) to \d+$")


def refuse(message):
    print(f"plot: {message}", file=sys.stderr)
    sys.exit(2)


def load_matplotlib():
    try:
        import matplotlib
        matplotlib.use("Agg")  # a file, no window
        from matplotlib import pyplot
    except ImportError:
        refuse("found no matplotlib in this Python, expected it; run it with one that has it (pip install matplotlib), "
               "in a working copy .venv/bin/python after scripts/bootstrap --with-tools")
    return pyplot


def metrics_file(run):
    """RUN/metrics/metrics.jsonl, or where the run's own config.toml says."""
    if run.is_file():
        return run
    config = run / "config.toml"
    if config.is_file():
        import tomllib
        folder = tomllib.loads(config.read_text()).get("metrics", {}).get("folder", "metrics")
        if (run / folder / "metrics.jsonl").is_file():
            return run / folder / "metrics.jsonl"
    return run / "metrics/metrics.jsonl"


def read_metrics(path):
    """{"name": ([step, ...], [value, ...])}; a line that a crash has torn is the last one."""
    if not path.is_file():
        refuse(f"found no {path}, expected the metrics of a run")
    series = {}
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            metrics = json.loads(line)
            step = metrics.pop("step")
        except (ValueError, KeyError, TypeError, AttributeError):
            if number == len(lines):
                break
            refuse(f"{path}:{number}: found a line that is no metrics, expected a JSON object with "
                   "a step")
        for name, value in metrics.items():
            steps, values = series.setdefault(name, ([], []))
            steps.append(step)
            values.append(float("nan") if value is None else value)
    if not series:
        refuse(f"{path}: found no step, expected at least one")
    return series


def resumptions(log, series):
    """The steps behind which the run was resumed. Where it was resumed from an earlier checkpoint, or started again, its
    metrics have been cut back to there, and so are these."""
    if not log.is_file():
        return []
    found = []
    with open(log, encoding="utf-8", errors="replace") as lines:
        for attempt in filter(None, map(ATTEMPT.search, lines)):
            done = int(attempt[1]) - 1
            found = [step for step in found if step < done] + [done] * (done > 0)
    last = max(step for steps, _ in series.values() for step in steps)
    return [step for step in found if step < last]


def smoothed(values):
    """The median around each step: a slow step is no trend. Of what is known there: a step without a
    label has no loss."""
    half = len(values) // 50
    known = ([value for value in values[max(0, i - half):i + half + 1] if value == value] for i in range(len(values)))
    return [statistics.median(around) if around else float("nan") for around in known]


def draw_line(axis, series, name, label, color=LINE, smooth=False):
    if name not in series:
        return
    steps, values = series[name]
    lonely = "o" if len(steps) == 1 else None
    if smooth and len(values) >= 100:
        axis.plot(steps, values, color=FAINT, linewidth=0.8)
        values = smoothed(values)
    axis.plot(steps, values, color=color, linewidth=1.4, marker=lonely, label=label)


def begin_at_zero(axis):
    """Else the noise of a steady figure fills the picture."""
    axis.set_ylim(0, 1.05 * max(axis.get_ylim()[1], 1e-12))


def draw(pyplot, series, resumed, title, out):
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), layout="constrained")
    (loss, norm), (speed, memory) = axes

    draw_line(loss, series, "loss", "training", smooth=True)
    if "val_loss" in series:
        loss.plot(*series["val_loss"], color=HELD_OUT, marker="o", markersize=4, linewidth=1.4,
                  label="held out")
    for axis in axes.flat:
        for step in resumed:
            axis.axvline(step, color=RESUMED, linewidth=0.9, linestyle=":", label="resumed" if step == resumed[0] else None)
    loss.set(title="loss", ylabel="nats a token")
    loss.legend(frameon=False)

    draw_line(norm, series, "grad_norm", "gradient norm", smooth=True)
    norm.set(title="gradient norm, before clipping")
    begin_at_zero(norm)

    draw_line(speed, series, "tps_global", "tokens a second", smooth=True)
    begin_at_zero(speed)
    speed.set(title="speed, all ranks", ylabel="tokens a second", xlabel="step")

    draw_line(memory, series, "peak_rss_mib", "peak RSS")
    memory.set(title="peak memory, largest rank", ylabel="MiB", xlabel="step")
    begin_at_zero(memory)

    for axis in axes.flat:
        axis.grid(color="#e4e4e4", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    figure.suptitle(title)
    figure.savefig(out, dpi=130)


def main(arguments):
    if arguments in (["-h"], ["--help"]):
        print(__doc__)
        return
    if not 1 <= len(arguments) <= 2:
        refuse(f"found {len(arguments)} arguments, expected RUN [OUT.png]")
    run = pathlib.Path(arguments[0])
    path = metrics_file(run)
    folder = run if run.is_dir() else run.parent
    home = run if run.is_dir() else path.resolve().parents[1]  # RUN/metrics/metrics.jsonl
    out = pathlib.Path(arguments[1]) if len(arguments) == 2 else folder / "metrics.png"
    series = read_metrics(path)
    pyplot = load_matplotlib()
    try:
        draw(pyplot, series, resumptions(home / "logs/rank_0.log", series), run.resolve().name, out)
    except (OSError, ValueError) as error:  # no such folder, no such format
        refuse(f"{out}: {error}")
    print(out)


if __name__ == "__main__":
    main(sys.argv[1:])
