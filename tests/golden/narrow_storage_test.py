#!/usr/bin/env python3
"""`tessera train` on shards that are stored in bf16, against fp32 ones.

Run by ctest with TESSERA_PROGRAM and TESSERA_TEST_DATA; leaves with 77 (skipped) where `safetensors` is
missing, as with TESSERA_TORCH.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

try:
    import torch
    from safetensors import safe_open
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

DATA = pathlib.Path(os.environ["TESSERA_TEST_DATA"])
STEPS = 12


class NarrowStorage(unittest.TestCase):
    def setUp(self):
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        self.folder = pathlib.Path(made.name)
        # Weights that bf16 holds exactly, so that both runs begin with the same.
        self.run_tessera("convert", DATA / "llama-fp32", "model", "--dtype", "bfloat16")
        (self.folder / "run.toml").write_text(
            '[model]\npath = "model"\n[data]\npath = "text.bin"\n[training]\n'
            f"steps = {STEPS}\nseq_len = 16\nglobal_batch_size = 4\n[optimizer]\nlr = 1e-4\n")
        vocabulary = json.loads((self.folder / "model/config.json").read_text())["vocab_size"]
        tokens = [(i * i * 7 + i) % vocabulary for i in range(2000)]
        (self.folder / "text.bin").write_bytes(b"".join(t.to_bytes(2, "little") for t in tokens))
        (self.folder / "text.json").write_text(
            json.dumps({"dtype": "uint16", "num_tokens": len(tokens), "vocab_size": vocabulary}))

    def run_tessera(self, *words, code=0):
        done = subprocess.run([os.environ["TESSERA_PROGRAM"], *map(str, words)], capture_output=True, text=True,
                              cwd=self.folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
        self.assertEqual(done.returncode, code, done.stderr)
        return done.stderr

    def train(self, run, storage, *more):
        self.run_tessera("train", "run.toml", "--nproc", 2, "--job.dump_folder", run,
                         "--precision.storage_dtype", storage, *more)
        lines = (self.folder / run / "metrics/metrics.jsonl").read_text().splitlines()
        return [[json.loads(line)[key] for key in ("step", "loss", "grad_norm")] for line in lines]

    def tensors(self, run, prefix):
        """What two ranks have written of each tensor, one after the other."""
        found = {}
        for rank in range(2):
            with safe_open(self.folder / run / f"checkpoint/step-{STEPS}/rank_{rank}.safetensors", "pt") as file:
                for name in file.keys():
                    if name.startswith(prefix):
                        found.setdefault(name.removeprefix(prefix), []).append(file.get_tensor(name))
        return {name: torch.cat(parts) for name, parts in found.items()}

    def test_with_adamw_it_has_the_bits_of_fp32_storage_that_is_rounded_alike(self):
        """Naive: without masters, updates of 1e-4 would vanish in weights of 0.02."""
        wide = self.train("wide", "float32", "--precision.param_rounding", "half_away")
        narrow = self.train("narrow", "auto")
        self.assertEqual(len(wide), STEPS)
        self.assertEqual(narrow, wide)
        fp32, stored = self.tensors("wide", "model/"), self.tensors("narrow", "model/")
        remainders = self.tensors("narrow", "optim/master_remainder/")
        self.assertEqual(remainders.keys(), fp32.keys())
        for name, value in fp32.items():
            with self.subTest(name):
                self.assertEqual((stored[name].dtype, remainders[name].dtype), (torch.bfloat16, torch.int16))
                bits = (stored[name].view(torch.int16).to(torch.int32) << 16) + remainders[name].to(torch.int32)
                self.assertTrue(torch.equal(bits.view(torch.float32), value))
                self.assertFalse(torch.equal(stored[name].float(), value))

    def test_a_resumed_run_keeps_its_masters(self):
        whole = self.train("whole", "auto")
        self.train("parts", "auto", "--training.steps", STEPS // 2)
        self.assertEqual(self.train("parts", "auto"), whole)

    def test_sgd_keeps_the_same_bits_unless_it_is_told_to_keep_none(self):
        steps = self.train("kept", "bfloat16", "--optimizer.name", "SGD")
        self.assertEqual(len(steps), STEPS)
        self.assertTrue(self.tensors("kept", "optim/master_remainder/"))
        steps = self.train("told", "bfloat16", "--optimizer.name", "SGD", "--optimizer.master", "none")
        self.assertEqual(len(steps), STEPS)
        self.assertFalse(self.tensors("told", "optim/master_remainder/"))


if __name__ == "__main__":
    unittest.main(verbosity=1)
