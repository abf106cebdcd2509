#!/usr/bin/env python3
"""docs/config.md, `tessera --help-keys` and the configuration that a run really has are the same.

Run by ctest with TESSERA_PROGRAM.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import tomllib
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
sys.dont_write_bytecode = True
import config_page  # noqa: E402

# The keys that a run needs; all others have defaults.
LEAST = {"model.config": "model.json", "data.path": ["text.txt"], "training.steps": 1, "training.seq_len": 8,
         "optimizer.lr": 0.5}


def rows():
    return [row for section in config_page.sections(config_page.help_text()).values() for row in section]


def resolved():
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write('[model]\nconfig = "model.json"\n[data]\npath = "text.txt"\n[training]\nsteps = 1\nseq_len = 8\n'
                   "[optimizer]\nlr = 0.5\n")
        file.flush()
        done = subprocess.run([os.environ["TESSERA_PROGRAM"], "train", file.name, "--print-config"], check=True,
                              capture_output=True, text=True)
    found = {}
    for name, value in tomllib.loads(done.stdout).items():
        found.update({f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict)
                     else {name: value})
    return found


class ConfigPage(unittest.TestCase):
    def test_the_page_is_what_the_script_writes(self):
        page = config_page.PAGE.read_text()
        self.assertEqual(page, config_page.filled(page, config_page.sections(config_page.help_text())),
                         "scripts/config_page.py brings docs/config.md up to date")

    def test_the_page_has_every_key_of_help_and_no_other(self):
        in_page = re.findall(r"^\| `((?:\w+\.)?\w+)` \| [^|]", config_page.PAGE.read_text(), re.MULTILINE)
        of_rules = {"storage_dtype", "grad_dtype", "pin", "widen", "frozen", "param_dtype"}
        self.assertEqual([key for key in in_page if key not in of_rules], [row["key"] for row in rows()])

    def test_every_key_says_what_it_is(self):
        for row in rows():
            with self.subTest(row["key"]):
                self.assertTrue(row["type"] and row["default"] and row["meaning"])

    def test_defaults_are_those_of_a_run_that_sets_nothing(self):
        config, listed = resolved(), {row["key"]: row["default"] for row in rows()}
        self.assertLessEqual(config.keys(), listed.keys())
        for key, default in listed.items():
            with self.subTest(key):
                if key in LEAST:
                    self.assertEqual(config[key], LEAST[key])
                elif config_page.is_toml(default):
                    self.assertEqual(config[key], tomllib.loads(f"x = {default}")["x"])
                else:
                    self.assertNotIn(key, config)  # no default of its own: words say what happens


if __name__ == "__main__":
    unittest.main(verbosity=1)
