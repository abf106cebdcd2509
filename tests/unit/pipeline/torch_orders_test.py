#!/usr/bin/env python3
"""Every schedule compared with PyTorch's: orders of all kinds, messages, files read and written by both.

Run by ctest with TESSERA_SCHEDULES_TOOL (print_schedules); leaves with 77 (skipped) without torch.
TESSERA_FULL=1 takes all of 1-8 ranks, 1-4 stages a rank and up to 3 x stages micro-batches; else a
seeded part. No process group: stages are stand-ins.
"""

import collections
import os
import pathlib
import random
import sys
import tempfile
import types
import unittest

from schedules_tool import KINDS, ask, make, shapes_of, with_waits, without_waits, write

try:
    from torch.distributed.pipelining import schedules as torch_schedules
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

FULL = os.environ.get("TESSERA_FULL") == "1"
PART = 160  # shapes a kind that has more
SEED = 20261124

TORCH_CLASSES = {
    "GPipe": "ScheduleGPipe",
    "1F1B": "Schedule1F1B",
    "Interleaved1F1B": "ScheduleInterleaved1F1B",
    "ZB1P": "ScheduleInterleavedZeroBubble",
    "InterleavedZeroBubble": "ScheduleInterleavedZeroBubble",
    "ZBV": "ScheduleZBVZeroBubble",
    "DualPipeV": "ScheduleDualPipeV",
}
# From 2.15 on a file with messages says where each send and each reduction is waited for.
WAITS = hasattr(torch_schedules, "WAIT_SEND_F")


def some_shapes():
    """All, or a part of each kind that leaves out the largest: a thousand slots a rank take a second."""
    draw = random.Random(SEED)
    for kind in KINDS:
        shapes = list(shapes_of(kind))
        if not FULL:
            shapes = [shape for shape in shapes if shape.stages_per_rank * shape.micro_batches <= 60]
            shapes = draw.sample(shapes, min(PART, len(shapes)))
        yield from shapes


def stand_in(shape, rank, chunk=0):
    return types.SimpleNamespace(
        stage_index=chunk * shape.ranks + rank, num_stages=shape.ranks * shape.stages_per_rank,
        group_size=shape.ranks, group_rank=rank, submod=None, is_first=False, is_last=False,
        has_backward=True)


def loss(*_):
    return None


def of_torch(shape, rank=0, lowered=False):
    """PyTorch's schedule, which knows the lists of all ranks. Lowering takes most of its time."""
    schedule_class = getattr(torch_schedules, TORCH_CLASSES[shape.kind])
    if issubclass(schedule_class, torch_schedules.PipelineScheduleSingle):
        return schedule_class(stand_in(shape, rank), n_microbatches=shape.micro_batches, loss_fn=loss)
    stages = [stand_in(shape, rank, chunk) for chunk in range(shape.stages_per_rank)]
    runtime = torch_schedules._PipelineScheduleRuntime
    prepare = runtime._prepare_schedule_with_comms
    if not lowered:
        runtime._prepare_schedule_with_comms = lambda *_, **__: None
    try:
        return schedule_class(stages, n_microbatches=shape.micro_batches, loss_fn=loss)
    finally:
        runtime._prepare_schedule_with_comms = prepare


class RecordingStage:
    """What Schedule1F1B calls on its stage. Its _get_pipeline_order is wrong on the last rank, in 2.13 and in 2.15."""

    def __init__(self, shape, rank):
        self.__dict__.update(vars(stand_in(shape, rank)))
        self.order = []

    def _no_operations(self, _):
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _no_operations

    def forward_one_chunk(self, micro_batch, *_, **__):
        self.order.append(f"{self.stage_index}F{micro_batch}")

    def backward_one_chunk(self, micro_batch, **__):
        self.order.append(f"{self.stage_index}B{micro_batch}")

    def _nothing(self, *_):
        pass

    perform_reduce_grad = release_fwd_send_outputs = _nothing


def one_f_one_b(shape, rank):
    stage = RecordingStage(shape, rank)
    schedule = torch_schedules.Schedule1F1B(stage, n_microbatches=shape.micro_batches, loss_fn=loss)
    nothing = [None] * shape.micro_batches
    for name in ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"):
        setattr(schedule, name, lambda *_, **__: None)
    schedule._check_inputs = lambda *_, **__: (nothing, nothing)
    schedule._step_microbatches()
    return stage.order


def order_of_torch(shape):
    """Of each rank; None where PyTorch refuses the shape."""
    try:
        if shape.kind == "1F1B":
            return [one_f_one_b(shape, rank) for rank in range(shape.ranks)]
        schedule = of_torch(shape)
    except ValueError:
        return None
    order = schedule.pipeline_order if shape.kind != "GPipe" else schedule._get_pipeline_order()
    return [[str(action) for action in order[rank]
             if action is not None and action.is_compute_op]
            for rank in range(shape.ranks)]


class Orders(unittest.TestCase):
    def test_are_pytorchs_and_so_is_what_is_refused(self):
        shapes = list(some_shapes())
        taken = collections.Counter()
        refused = 0
        for shape, answer in zip(shapes, ask([make(shape) for shape in shapes]), strict=True):
            with self.subTest(shape=shape):
                expected = order_of_torch(shape)
                self.assertEqual(answer.word, "refused" if expected is None else "made")
                if expected is None:
                    refused += 1
                    continue
                self.assertEqual(answer.rows[:shape.ranks], expected)
                taken[shape.kind] += 1
        for kind in KINDS:
            self.assertGreater(taken[kind], 30, kind)
        self.assertGreater(refused, 100)
        print(f"{sum(taken.values())} schedules are equal, {refused} shapes are refused by both: {dict(taken)}")


class Files(unittest.TestCase):
    """compute_only and compute_comms, written by one and read by the other."""

    @classmethod
    def setUpClass(cls):
        made = tempfile.TemporaryDirectory()
        cls.addClassCleanup(made.cleanup)
        cls.folder = pathlib.Path(made.name)
        draw = random.Random(SEED)
        cls.shapes = []
        for kind, torch_class in TORCH_CLASSES.items():
            if issubclass(getattr(torch_schedules, torch_class), torch_schedules.PipelineScheduleSingle):
                continue
            shapes = [shape for shape in shapes_of(kind) if FULL or shape.ranks <= 3]
            cls.shapes += shapes if FULL else draw.sample(shapes, 12)
        cls.answers = dict(zip(cls.shapes, ask([make(shape) for shape in cls.shapes]), strict=True))
        cls.shapes = [shape for shape in cls.shapes if cls.answers[shape].word == "made"]

    def test_pytorch_reads_ours(self):
        for shape in self.shapes:
            rows = self.answers[shape].rows
            slots, steps = rows[:shape.ranks], rows[shape.ranks:]
            if WAITS:
                steps = [with_waits(row) for row in steps]
            schedule = of_torch(shape, lowered=True)
            theirs = schedule.pipeline_order_with_comms
            with self.subTest(shape=shape):
                schedule._load_csv(write(self.folder / "ours.csv", slots), "compute_only")
                self.assertEqual([[str(a) for a in schedule.pipeline_order[r]] for r in range(shape.ranks)], slots)
                schedule._load_csv(write(self.folder / "ours.csv", steps), "compute_comms")
                read = schedule.pipeline_order_with_comms
                self.assertEqual([[str(a) for a in read[r]] for r in range(shape.ranks)], steps)
                # The same messages, wherever PyTorch puts its receives.
                for rank in range(shape.ranks):
                    self.assertEqual(messages(read[rank]), messages(theirs[rank]))

    def test_ours_reads_pytorchs(self):
        paths = []
        for number, shape in enumerate(self.shapes):
            schedule = of_torch(shape, lowered=True)
            for form in ("compute_only", "compute_comms"):
                path = self.folder / f"{form}{number}.csv"
                schedule._dump_csv(path, form)
                paths.append((shape, path))
        answers = ask([f"read {path}" for _, path in paths])
        for (shape, path), answer in zip(paths, answers, strict=True):
            with self.subTest(shape=shape, form=path.name):
                self.assertEqual(answer.word, "valid")
                expected = [without_waits(cell for cell in line.split(",") if cell)
                            for line in path.read_text().splitlines()]
                self.assertEqual(answer.rows, expected)
        self.assertGreater(len(paths), 60)
        print(f"{len(paths)} files are read and read back")

    def test_files_of_one_stage_a_rank_go_through_its_reader(self):
        """GPipe and 1F1B have no files of their own there; its reader and its validator take ours."""
        shapes = [shape for kind in ("GPipe", "1F1B") for shape in shapes_of(kind)
                  if shape.ranks == 3 and shape.micro_batches >= 3]
        for shape, answer in zip(shapes, ask([make(shape) for shape in shapes]), strict=True):
            host = of_torch(shape._replace(kind="Interleaved1F1B", micro_batches=3))
            host._n_microbatches = shape.micro_batches
            with self.subTest(shape=shape):
                slots = answer.rows[:shape.ranks]
                host._load_csv(write(self.folder / "single.csv", slots), "compute_only")
                self.assertEqual([[str(a) for a in host.pipeline_order[r]] for r in range(shape.ranks)], slots)


def messages(actions):
    return sorted(str(a) for a in actions if a.computation_type.value[:5] in ("SEND_", "RECV_"))


if __name__ == "__main__":
    unittest.main(verbosity=1)
