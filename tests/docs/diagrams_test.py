#!/usr/bin/env python3
"""docs/img holds what scripts/diagrams draws, of values that the program has today.

Run by ctest with TESSERA_PROGRAM.
"""

import importlib.machinery
import importlib.util
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from xml.etree import ElementTree

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "diagrams"
IMAGES = ROOT / "docs" / "img"
NAMES = ("checkpoint", "contract", "floors", "mesh", "micro_batch", "step")

sys.path.insert(0, str(SCRIPT.parent))
sys.dont_write_bytecode = True
loader = importlib.machinery.SourceFileLoader("diagrams", str(SCRIPT))
diagrams = importlib.util.module_from_spec(importlib.util.spec_from_loader("diagrams", loader))
loader.exec_module(diagrams)


def run(*arguments):
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


class Diagrams(unittest.TestCase):
    def test_the_committed_pictures_are_what_the_script_draws(self):
        done = run("--check")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(sorted(p.name for p in IMAGES.iterdir()), [f"{name}.svg" for name in NAMES])

    def test_a_picture_that_differs_or_lacks_is_named_and_left_alone(self):
        with tempfile.TemporaryDirectory() as folder:
            copy = pathlib.Path(folder)
            shutil.copytree(IMAGES, copy, dirs_exist_ok=True)
            changed = (copy / "step.svg").read_text().replace("gather", "gathers", 1)
            (copy / "step.svg").write_text(changed)
            (copy / "mesh.svg").unlink()
            done = run("--check", "--into", folder)
            self.assertEqual(done.returncode, 3)
            self.assertEqual(sorted(re.findall(r"(\w+)\.svg", done.stderr)), ["mesh", "step"])
            self.assertEqual((copy / "step.svg").read_text(), changed)
            self.assertFalse((copy / "mesh.svg").exists())

    def test_what_it_writes_passes_its_own_check(self):
        with tempfile.TemporaryDirectory() as folder:
            self.assertEqual(run("--into", folder).returncode, 0)
            self.assertEqual(run("--check", "--into", folder).returncode, 0)

    def test_the_bucket_has_the_dtypes_of_the_program(self):
        self.assertEqual(json.loads(diagrams.DATA.read_text())["contract"], diagrams.bucket_now())

    def test_each_picture_stands_alone_and_follows_the_colour_scheme(self):
        for name in NAMES:
            with self.subTest(name):
                text = (IMAGES / f"{name}.svg").read_text()
                root = ElementTree.fromstring(text)
                self.assertEqual(root.get("viewBox").split()[2], "800")
                self.assertIn("prefers-color-scheme:dark", text)
                self.assertGreaterEqual(min(int(size) for size in re.findall(r"(\d+)px", text)), 12)
                self.assertNotRegex(text.replace("http://www.w3.org/2000/svg", ""), r"https?:|@import|@font-face|href=")


if __name__ == "__main__":
    unittest.main(verbosity=1)
