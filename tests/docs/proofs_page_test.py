#!/usr/bin/env python3
"""docs/proofs.md has a row for every proof of scripts/full, and for no other; what is no proof is refused."""

import pathlib
import re
import subprocess
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def rows():
    """Returns the rows of the table of proofs, without those of the slow tests below it."""
    proofs = (ROOT / "docs/proofs.md").read_text().split("\n## ", maxsplit=1)[0]
    return re.findall(r"^\| `\w+` \|.*$", proofs, flags=re.M)


def full(*words):
    return subprocess.run([ROOT / "scripts/full", *words], capture_output=True, text=True, check=False)


class ProofsPage(unittest.TestCase):
    def test_it_lists_what_scripts_full_runs(self):
        listed = [line.split()[0] for line in full("--list").stdout.splitlines()]
        defined = re.findall(r"^full_(\w+)\(\)", (ROOT / "scripts/full").read_text(), flags=re.M)
        self.assertGreater(len(listed), 3)
        self.assertEqual(sorted(listed), sorted(defined))
        self.assertEqual(listed, [row.split("`")[1] for row in rows()])

    def test_each_row_has_its_cells(self):
        for row in rows():
            self.assertEqual(row.count("|"), 6, row)

    def test_what_is_no_proof_is_refused_and_the_names_are_said(self):
        for words in ((), ("everything",), ("layouts", "--recrod"), ("layouts", "--record", "more")):
            done = full(*words)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn("full: ", done.stderr)
        self.assertIn("layouts", full("everything").stderr)


if __name__ == "__main__":
    unittest.main(verbosity=1)
