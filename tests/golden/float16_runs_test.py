#!/usr/bin/env python3
"""`tessera train` and `tessera gradients` in fp16 as a user runs them: storage, scale, resumption, exit codes.

Run by ctest with TESSERA_PROGRAM and TESSERA_TEST_DATA; leaves with 77 (skipped) where `safetensors` is
missing, as with TESSERA_TORCH.
"""

import json
import math
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import unittest

try:
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

DATA = pathlib.Path(os.environ["TESSERA_TEST_DATA"])
STEPS = 8
HALF = ("--precision.param_dtype", "float16")


def scheduled(update, warmup, decay, decay_steps, factor):
    """What the learning rate of an update is multiplied by (docs/config.md, lr_scheduler)."""
    if update <= warmup:
        return update / warmup
    whole = max(warmup, STEPS - decay_steps) if decay == "wsd" else warmup
    if update <= whole:
        return 1.0
    done = min(1.0, (update - whole) / (STEPS + 1 - whole))
    left = 0.5 * (1.0 + math.cos(math.pi * done)) if decay == "cosine" else 1.0 - done
    return factor + (1.0 - factor) * left


class Float16(unittest.TestCase):
    def setUp(self):
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        self.folder = pathlib.Path(made.name)
        # Weights in fp16, so that narrow and wide storage begin with the same.
        source = DATA / "llama-fp32"
        (self.folder / "model").mkdir()
        save_file({name: value.half() for name, value in load_file(source / "model.safetensors").items()},
                  self.folder / "model/model.safetensors", {"format": "pt"})
        config = json.loads((source / "config.hub.json").read_text())
        config = {key: "float16" if key in ("dtype", "torch_dtype") else value for key, value in config.items()}
        (self.folder / "model/config.json").write_text(json.dumps(config))
        (self.folder / "run.toml").write_text(
            '[model]\npath = "model"\n[data]\npath = "text.bin"\n[training]\n'
            f"steps = {STEPS}\nseq_len = 16\nglobal_batch_size = 4\n[optimizer]\nlr = 1e-4\n")
        tokens = [(i * i * 7 + i) % config["vocab_size"] for i in range(2000)]
        (self.folder / "text.bin").write_bytes(b"".join(t.to_bytes(2, "little") for t in tokens))
        (self.folder / "text.json").write_text(
            json.dumps({"dtype": "uint16", "num_tokens": len(tokens), "vocab_size": config["vocab_size"]}))

    def run_tessera(self, *words, code=0):
        done = subprocess.run([os.environ["TESSERA_PROGRAM"], *map(str, words)], capture_output=True, text=True,
                              cwd=self.folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
        self.assertEqual(done.returncode, code, done.stderr)
        return done.stderr

    def train(self, run, *more, code=0):
        return self.run_tessera("train", "run.toml", "--nproc", 2, "--job.dump_folder", run, *more, code=code)

    def metrics(self, run):
        text = (self.folder / run / "metrics/metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def lines(self, run):
        keys = ("step", "loss", "grad_norm", "loss_scale", "skipped_steps")
        return [[line.get(key) for key in keys] for line in self.metrics(run)]

    def parameters(self, run):
        found = {}
        for rank in range(2):
            with safe_open(self.folder / run / f"checkpoint/step-{STEPS}/rank_{rank}.safetensors", "pt") as file:
                for name in file.keys():
                    if name.startswith("model/"):
                        found.setdefault(name, []).append(file.get_tensor(name))
        return {name: torch.cat(parts) for name, parts in found.items()}

    def test_fp16_storage_with_its_copy_has_the_bits_of_fp32_storage(self):
        """Naive: updates of 1e-4 are lost in weights in fp16."""
        wire = ("--precision.reduce_dtype", "float16")
        self.train("wide", *HALF, *wire, "--precision.storage_dtype", "float32")
        self.train("narrow", *HALF, *wire, "--precision.storage_dtype", "auto")
        self.assertEqual(self.lines("narrow"), self.lines("wide"))
        wide, narrow = self.parameters("wide"), self.parameters("narrow")
        for name, value in wide.items():
            with self.subTest(name):
                self.assertEqual((value.dtype, narrow[name].dtype), (torch.float32, torch.float16))
                self.assertTrue(torch.equal(narrow[name], value.half()))
        self.train("told", *HALF, "--precision.storage_dtype", "auto", "--optimizer.master", "none",
                   "--optimizer.name", "SGD")
        self.assertEqual(len(self.lines("told")), STEPS)

    def test_steps_that_overflow_are_left_out_and_a_resumed_run_keeps_their_scale(self):
        scaler = ("--grad_scaler.init_scale", 2.0**40, "--grad_scaler.backoff_factor", 2.0**-8,
                  "--grad_scaler.growth_interval", 2)
        said = self.train("whole", *HALF, *scaler)
        self.assertIn("step 1: gradients are not finite at the loss scale", said)
        whole = self.lines("whole")
        self.assertEqual(whole[0][2:], [None, 2.0**40, 1.0])
        skipped = int(whole[-1][4])
        self.assertTrue(1 <= skipped <= STEPS - 3, skipped)
        self.assertEqual(sum(line[2] is None for line in whole), skipped)
        self.train("parts", *HALF, *scaler, "--training.steps", 5)
        self.train("parts", *HALF, *scaler)
        self.assertEqual(self.lines("parts"), whole)

    def test_the_schedule_waits_for_steps_that_overflow_and_a_resumed_run_has_the_same(self):
        """Drawn schedules: the k-th update has the k-th learning rate, as accelerate's scheduler has it."""
        for seed in range(3):
            with self.subTest(seed):
                draw = random.Random(seed)
                decay = ("linear", "cosine", "wsd")[seed]
                warmup, factor = draw.randint(1, 5), draw.choice((0.0, 0.25))
                words = (*HALF, "--grad_scaler.init_scale", 2.0**draw.randint(38, 42),
                         "--grad_scaler.backoff_factor", 2.0**-8, "--grad_scaler.growth_interval", 2,
                         "--lr_scheduler.warmup_steps", warmup, "--lr_scheduler.decay", decay,
                         "--lr_scheduler.min_lr_factor", factor)
                if decay == "wsd":
                    words += ("--lr_scheduler.decay_steps", 2)
                whole, parts = f"whole{seed}", f"parts{seed}"
                self.train(whole, *words, "--checkpoint.interval", 1)
                found = [(line["lr"], line["grad_norm"] is not None) for line in self.metrics(whole)]
                self.assertIn(False, [made for _, made in found])
                updates = 0
                for lr, made in found:
                    expected = 1e-4 * scheduled(updates + 1, warmup, decay, 2, factor)
                    self.assertAlmostEqual(lr, expected, delta=1e-12 * expected)
                    updates += made
                # A shorter run would have another schedule: this one resumes from one of its steps.
                shutil.copytree(self.folder / whole, self.folder / parts)
                again = draw.randint(1, STEPS - 1)
                self.train(parts, *words, "--checkpoint.load_step", again)
                self.assertEqual([(line["lr"], line["loss"]) for line in self.metrics(parts)],
                                 [(line["lr"], line["loss"]) for line in self.metrics(whole)])

    def test_a_scale_that_cannot_fall_ends_the_run(self):
        said = self.train("run", *HALF, "--grad_scaler.init_scale", 2.0**42, "--grad_scaler.min_scale", 2.0**40,
                          code=1)
        self.assertIn("after 2 skipped steps", said)
        self.assertIn("grad_scaler.min_scale", said)
        self.assertIn("model.", said)

    def test_options_are_refused_before_the_first_step(self):
        said = self.train("run", "--grad_scaler.init_scale", 1024.0, code=2)
        self.assertIn("grad_scaler: found values for a run without float16", said)
        self.assertIn("power of two", self.train("run", *HALF, "--grad_scaler.init_scale", 1000.0, code=2))

    def test_contract_shows_what_is_in_fp16(self):
        (self.folder / "half.toml").write_text(
            (self.folder / "run.toml").read_text() + '[precision]\nparam_dtype = "float16"\nreduce_dtype = "float16"\n')
        done = subprocess.run([os.environ["TESSERA_PROGRAM"], "inspect", "--contract", "half.toml"],
                              capture_output=True, text=True, cwd=self.folder, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("float16", done.stdout)


if __name__ == "__main__":
    unittest.main(verbosity=1)
