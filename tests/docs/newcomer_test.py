#!/usr/bin/env python3
"""A newcomer's way: clone, ./run, the three commands that it proposes (on with more steps, a sample, a
Hugging Face folder), that folder in transformers, with the logits that Tessera computes, and an installed copy.

Shorter than ./run by itself. A tree without changes is a newcomer's own: there ./run finds the program that was
just built, and what it makes is removed again. Of a tree with changes it is a clone, into which they are put, with
packages, .venv and corpus as they are here: there the program is compiled again.
Leaves with 77 (skipped) where this is no git working copy or `transformers` is missing.
"""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

try:
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)
sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import clean_copy  # noqa: E402

STEPS = 40
FLOAT32 = ("--precision.param_dtype", "float32", "--precision.storage_dtype", "float32")
# From a second fp32 implementation, in the README of the reference data.
LOGITS_BOUND = 5e-5


class Newcomer(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        made = tempfile.TemporaryDirectory()
        cls.addClassCleanup(made.cleanup)
        cls.made = pathlib.Path(made.name)
        (cls.made / ".venv").symlink_to(clean_copy.ROOT / ".venv")
        changes = subprocess.run(["git", "status", "--porcelain"], cwd=clean_copy.ROOT, capture_output=True, check=True)
        cls.tree = cls.cloned() if changes.stdout else clean_copy.ROOT
        cls.environment = clean_copy.environment(cls.made)
        cls.said = cls.run_here("./run", "--no-apt", "--training.steps", STEPS, "--validation.interval", STEPS,
                                "--validation.steps", 4, "--checkpoint.interval", STEPS)
        cls.run_folder = re.search(r"Run folder: (\S+)", cls.said)[1]
        cls.addClassCleanup(shutil.rmtree, cls.tree / cls.run_folder)

    @classmethod
    def cloned(cls):
        clone = cls.made / "tessera"
        subprocess.run(["git", "clone", "--quiet", clean_copy.ROOT, clone], check=True)
        clean_copy.overlay(clone)
        (clone / ".venv").symlink_to(clean_copy.ROOT / ".venv")
        corpus = clean_copy.ROOT / ".cache"
        if (corpus / "corpus").is_dir():
            (clone / ".cache").symlink_to(corpus)
        return clone

    @classmethod
    def run_here(cls, *words):
        done = subprocess.run(list(map(str, words)), cwd=cls.tree, env=cls.environment, capture_output=True,
                              text=True, errors="replace", stdin=subprocess.DEVNULL, check=False)
        if done.returncode:
            raise AssertionError(f"{words}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def logits_of_tessera(self, checkpoint, ids):
        batch, gradients = self.made / "batch.safetensors", self.made / "gradients.safetensors"
        save_file({"input_ids": ids, "labels": ids.clone()}, batch)
        self.run_here("build/release/tessera", "gradients", "--model", checkpoint, "--batch", batch,
                      "--out", gradients, *FLOAT32)
        return load_file(gradients)["logits"]

    def test_run_and_the_commands_that_it_proposes(self):
        self.assertIn("The model is clearly better than byte frequencies.", self.said)
        run = self.run_folder
        proposed = [line.split("#")[0].strip() for line in self.said.split("\nNext:\n")[1].splitlines()]
        self.assertEqual([re.split(r"\s+", line)[:2] for line in proposed if line],
                         [["build/release/tessera", verb] for verb in ("train", "generate", "convert")])
        said = [self.run_here("bash", "-euo", "pipefail", "-c", line) for line in proposed if line]

        # On from the checkpoint, not from the beginning, and to the new length.
        steps = [json.loads(line)["step"]
                 for line in (self.tree / run / "metrics/metrics.jsonl").read_text().splitlines()]
        self.assertEqual(steps, list(range(2 * STEPS + 1)))  # 0 is the validation before the first
        self.assertNotIn("step:  1  ", said[0])
        self.assertEqual((self.tree / run / "checkpoint/latest").read_text().strip(), f"step-{2 * STEPS}")
        self.assertGreater(len(said[1]), 100)  # 300 new bytes, some of them escaped or of one letter

        ids = torch.randint(0, 257, (2, 32), generator=torch.Generator().manual_seed(1))
        model = transformers.AutoModelForCausalLM.from_pretrained(self.tree / run / "hf", dtype=torch.float32).eval()
        with torch.no_grad():
            found = model(ids).logits
        expected = self.logits_of_tessera(f"{run}/checkpoint/step-{2 * STEPS}", ids)
        self.assertLess((found - expected).abs().max().item(), LOGITS_BOUND)

    def test_after_it_a_copy_is_installed_whole_by_either_command(self):
        self.run_here("cmake", "--install", "build/release", "--prefix", self.made / "by_cmake")
        self.run_here("bash", "-euo", "pipefail", "-c",
                      f"cd configs && ../scripts/bootstrap --no-apt --install {self.made}/ours")
        installed = [sorted(path.relative_to(self.made / prefix) for path in (self.made / prefix).rglob("*"))
                     for prefix in ("by_cmake", "ours")]
        self.assertEqual(*installed)
        names = set(map(str, installed[0]))
        self.assertLessEqual({"bin/tessera", "lib/libtessera.a", "include/tessera/tessera.h", "share/tessera/tools/chat.py",
                              "lib/cmake/Tessera/TesseraConfig.cmake", "share/tessera/configs/tiny.toml"}, names)
        said = self.run_here("bash", "-euo", "pipefail", "-c", f"cd {self.made}/ours/share/tessera && "
                             "../../bin/tessera inspect --contract configs/tiny.toml --world 2")
        self.assertIn("model.embed_tokens.weight", said)


if __name__ == "__main__":
    if not (clean_copy.ROOT / ".git").exists():
        print("skipped: not a git working copy")
        sys.exit(77)
    unittest.main(verbosity=1)
