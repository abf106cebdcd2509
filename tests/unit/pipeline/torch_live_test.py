#!/usr/bin/env python3
"""Live micro-batches of each rank compared with PyTorch's analyze_pipeline_activation_liveness, which came with 2.15.

Below 2.15 the truth is what it counted, recorded in torch_live.json; from 2.15 on it counts again, and must count what
is recorded. `torch_live_test.py --record` under 2.15 writes the file: no number in it is ours. Every schedule is
counted as slots (compute_only) and with messages (compute_comms), each read from a file by both.

The analysis takes a schedule of PyTorch's class for several stages a rank, which reads files with one stage a rank,
too: GPipe, 1F1B and ZB1P go that way as all others. Schedule1F1B's own list cannot: on the last rank its
_get_pipeline_order leaves out micro-batch 0, in 2.15 too (torch_orders_test compares what it runs).

Run by ctest with TESSERA_SCHEDULES_TOOL (print_schedules) and TESSERA_PROGRAM. A seeded part; with TESSERA_FULL=1 all
shapes of 2-8 ranks that a kind takes, and 2,000 random valid schedules, drawn as validate_test draws them. Those that
are not recorded are compared by a digest where torch is older than 2.15.
"""

import hashlib
import importlib.metadata
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import types
import unittest

from schedules_tool import KINDS, Shape, ask, make, shapes_of, with_waits, write

RECORDED = pathlib.Path(__file__).with_name("torch_live.json")
FULL = os.environ.get("TESSERA_FULL") == "1"
SEED = 20261129
SHAPES = 3  # of each kind and number of ranks, where only a part is taken
DRAWS, ALL_DRAWS = 100, 2000
DRAWN = "drawn"


def load_analysis():
    """None where the installed torch has no analysis. Its import takes seconds."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    if tuple(int(part) for part in version.split(".")[:2]) < (2, 15):
        return None
    from torch.distributed.pipelining import schedules

    return schedules


def slots_of(answer):
    return answer.rows[: len(answer.live)]


def steps_of(answer):
    return answer.rows[len(answer.live) :]


def counted_by(theirs, answer, folder):
    """Returns PyTorch's count on each rank of a schedule, from both of its files."""
    rows = slots_of(answer)
    actions = [re.findall(r"(\d+)[FIWB](\d+)", " ".join(row)) for row in rows]
    stages_of = [sorted({int(stage) for stage, _ in own}) for own in actions]
    micro_batches = 1 + max(int(micro_batch) for own in actions for _, micro_batch in own)
    stage = types.SimpleNamespace(
        stage_index=stages_of[0][0], num_stages=sum(map(len, stages_of)), group_size=len(rows), group_rank=0,
        submod=None, is_first=False, is_last=False, has_backward=True)
    files = (
        (theirs.PipelineScheduleMulti, "compute_only", rows),
        (theirs._PipelineScheduleRuntime, "compute_comms", [with_waits(row) for row in steps_of(answer)]))
    counts = []
    for schedule_class, form, read in files:
        schedule = schedule_class([stage], micro_batches, loss_fn=lambda *_: None)
        schedule._load_csv(write(folder / "schedule.csv", read), form)
        counts.append([
            theirs.analyze_pipeline_activation_liveness(
                schedule, pp_rank=rank, stage_indices=own, granularity="stage_microbatch").num_slots
            for rank, own in enumerate(stages_of)])
    if counts[0] != counts[1]:
        raise AssertionError(f"PyTorch counts {counts[0]} without messages, {counts[1]} with them: {rows}")
    return counts[0]


def all_cases():
    """Yields for each kind the commands of all shapes that it takes, and what the tool made."""
    for kind in KINDS:
        commands = [make(shape) for shape in shapes_of(kind, fewest_ranks=2)]
        yield kind, {command: answer for command, answer in zip(commands, ask(commands), strict=True)
                     if answer.word == "made"}
    commands = [f"draw {seed}" for seed in range(1, ALL_DRAWS + 1)]
    yield DRAWN, dict(zip(commands, ask(commands), strict=True))


def digest(counts):
    text = "\n".join(f"{command}: {' '.join(map(str, live))}" for command, live in counts.items())
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def record(theirs, folder):
    draw = random.Random(SEED)
    parts, whole = {}, {}
    for kind, answers in all_cases():
        counts = {command: counted_by(theirs, answer, folder) for command, answer in answers.items()}
        whole[kind] = digest(counts)
        commands = list(counts)[:DRAWS]
        if kind != DRAWN:
            commands = []
            for ranks in range(2, 9):
                of_ranks = [command for command in counts if command.split()[2] == str(ranks)]
                commands += draw.sample(of_ranks, min(SHAPES, len(of_ranks)))
        # "make ZBV 4 2 8" is stored as "4 2 8" below ZBV, "draw 7" as "7".
        parts[kind] = {" ".join(command.split()[-3:]).removeprefix("draw "): " ".join(map(str, counts[command]))
                       for command in commands}
        print(f"{kind}: {len(counts)} schedules, {sum(map(len, counts.values()))} ranks")
    lines = [f'"counted by": "torch {importlib.metadata.version("torch")}, analyze_pipeline_activation_liveness"',
             f'"digests of all": {json.dumps(whole)}']
    lines += [f"{json.dumps(kind)}: {json.dumps(part, separators=(',', ':'))}" for kind, part in parts.items()]
    RECORDED.write_text("{" + ",\n".join(lines) + "}\n")


def recorded():
    """The commands of the recorded part of each kind, with the counts."""
    whole = json.loads(RECORDED.read_text())
    return {kind: {f"draw {key}" if kind == DRAWN else make(Shape(kind, *map(int, key.split()))):
                   [int(count) for count in counts.split()]
                   for key, counts in whole[kind].items()}
            for kind in (*KINDS, DRAWN)}


class Live(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        made = tempfile.TemporaryDirectory()
        cls.addClassCleanup(made.cleanup)
        cls.folder = pathlib.Path(made.name)
        cls.theirs = load_analysis()

    def test_is_what_pytorch_counts(self):
        ranks = 0
        for kind, expected in recorded().items():
            answers = dict(zip(expected, ask(expected), strict=True))
            for command, counts in expected.items():
                with self.subTest(command):
                    self.assertEqual(answers[command].live, counts)
                    if self.theirs:
                        self.assertEqual(counted_by(self.theirs, answers[command], self.folder), counts)
                ranks += len(counts)
            if kind != DRAWN:
                self.assertEqual({command.split()[2] for command in expected}, set("2345678"), kind)
        self.assertGreater(ranks, 800)
        print(f"{ranks} ranks have as many live micro-batches as "
              f"{'PyTorch counts and has' if self.theirs else 'PyTorch 2.15 has'} recorded")

    def test_of_files_is_that_of_what_they_were_written_from(self):
        """With messages and without; the analysis reads the same files."""
        paths, expected = [], []
        for part in recorded().values():
            for command, answer in zip(part, ask(part), strict=True):
                for rows in (slots_of(answer), steps_of(answer)):
                    paths.append(write(self.folder / f"{len(paths)}.csv", rows))
                    expected.append((command, part[command]))
        for (command, counts), answer in zip(expected, ask([f"read {path}" for path in paths]), strict=True):
            with self.subTest(command):
                self.assertEqual(answer.word, "valid")
                self.assertEqual(answer.live, counts)

    @unittest.skipUnless(FULL, "TESSERA_FULL=1 takes all")
    def test_is_what_pytorch_counts_in_all(self):
        digests = json.loads(RECORDED.read_text())["digests of all"]
        for kind, answers in all_cases():
            for command, answer in answers.items() if self.theirs else ():
                with self.subTest(command):
                    self.assertEqual(answer.live, counted_by(self.theirs, answer, self.folder))
            with self.subTest(kind):
                live = {command: answer.live for command, answer in answers.items()}
                self.assertEqual(digest(live), digests[kind], "run this under torch 2.15, which says where")
            print(f"{kind}: {len(live)} schedules, {sum(map(len, live.values()))} ranks are equal")


class Program(unittest.TestCase):
    """`tessera schedule` prints these numbers."""

    def test_column_live(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "schedule.csv"
            for kind, part in recorded().items():
                command = max(part, key=lambda each: len(set(part[each])))
                shape = command.split()[1:]
                if kind == DRAWN:
                    arguments = [str(write(path, steps_of(ask([command])[0])))]
                else:
                    arguments = [kind, "--ranks", shape[1], "--micro-batches", shape[3]]
                    if len(KINDS[kind]) > 1:
                        arguments += ["--stages-per-rank", shape[2]]
                done = subprocess.run([os.environ["TESSERA_PROGRAM"], "schedule", *arguments],
                                      capture_output=True, text=True, check=True)
                table = done.stdout.split("open sends  stages\n")[1].split("\n\n")[0]
                with self.subTest(command):
                    self.assertEqual([int(line.split()[4]) for line in table.split("\n")], part[command])


if __name__ == "__main__":
    if sys.argv[1:] == ["--record"]:
        with tempfile.TemporaryDirectory() as made:
            record(load_analysis(), pathlib.Path(made))
    else:
        unittest.main(verbosity=1)
