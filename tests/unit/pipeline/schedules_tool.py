"""The tests against PyTorch share this: the shapes of all kinds, and print_schedules, which makes the schedules.

TESSERA_SCHEDULES_TOOL is its path.
"""

import collections
import os
import re
import subprocess

# Stages a rank of each kind.
KINDS = {
    "GPipe": (1,),
    "1F1B": (1,),
    "Interleaved1F1B": (1, 2, 3, 4),
    "ZB1P": (1,),
    "InterleavedZeroBubble": (1, 2, 3, 4),
    "ZBV": (2,),
    "DualPipeV": (2,),
}
Shape = collections.namedtuple("Shape", "kind ranks stages_per_rank micro_batches")
# Rows of a schedule, and the live micro-batches of each rank.
Answer = collections.namedtuple("Answer", "word rows live")


def shapes_of(kind, fewest_ranks=1):
    for ranks in range(fewest_ranks, 9):
        for stages in KINDS[kind]:
            for micro_batches in range(1, 3 * ranks * stages + 1):
                yield Shape(kind, ranks, stages, micro_batches)


def make(shape):
    return " ".join(("make", *map(str, shape)))


def ask(commands):
    """What the tool answers to each."""
    done = subprocess.run([os.environ["TESSERA_SCHEDULES_TOOL"]], input="\n".join(commands) + "\n",
                          capture_output=True, text=True, check=True)
    lines = iter(done.stdout.split("\n"))
    answers = []
    for _ in commands:
        word, rest = next(lines).split(" ", 1)
        rows, live = [], []
        if word in ("made", "valid"):
            rows = [next(lines).rstrip("\r").split(",") for _ in range(int(rest) - 1)]
            live = [int(count) for count in next(lines).split(",")]
        answers.append(Answer(word, rows, live))
    return answers


def write(path, rows):
    path.write_bytes("".join(",".join(row) + "\r\n" for row in rows).encode())
    return path


def with_waits(row):
    """A row of messages as PyTorch 2.15 wants it: each send and each reduction is waited for in the row, too."""
    steps, waits = [], []
    for step in row:
        steps.append(step)
        if "SEND_" in step:
            waits.append(step.replace("SEND_", "WAIT_SEND_"))
        elif step.endswith("REDUCE_GRAD"):
            steps.append(step.replace("REDUCE_GRAD", "WAIT_REDUCE_GRAD"))
    return steps + waits


def without_waits(row):
    return [step for step in row if not re.match(r"\d+WAIT_", step)]
