#!/usr/bin/env python3
"""How a page becomes steps (page.py): nothing that may have been meant to be run is passed over."""

import itertools
import pathlib
import re
import sys
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import page  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
# How the commands of a tutorial name what they make.
MAKES = (r"--job\.dump_folder (\S+)", r"convert \S+ (\S+)", r"save_pretrained\(\"([^\"]+)", r"--out (\S+)",
         r"--local-dir (\S+)", r"[^2]> (\S+)", r"open\(\"([^\"]+)\", \"w")


def made_by(steps):
    """Names of files and folders that the blocks of a page make."""
    text = "\n".join(step.text for step in steps if step.kind != "text")
    return {step.file for step in steps if step.file} | {name for way in MAKES for name in re.findall(way, text)}


class Page(unittest.TestCase):
    def test_blocks_and_comments_come_in_the_order_of_the_page(self):
        steps = page.steps_of("# Title\n<!-- test: setup\ncp a b\n-->\n```sh\nls\n```\n<!-- test: prints b$ -->\n"
                              "<!-- test: skip, because, well -->\n\n```toml\nx = 1\n```\n```text\nout\n```\n")
        self.assertEqual([(s.kind, s.text, s.line) for s in steps],
                         [("setup", "cp a b", 2), ("sh", "ls", 5), ("prints", "b$", 8), ("toml", "x = 1", 11),
                          ("text", "out", 14)])
        self.assertEqual([s.skip for s in steps], ["", "", "", "because, well", ""])

    def test_a_note_is_for_the_next_block_only(self):
        steps = page.steps_of("<!-- test: file a.json -->\n```json\n{}\n```\n```sh\nls\n```\n")
        self.assertEqual([s.file for s in steps], ["a.json", ""])

    def test_what_could_hide_a_block_is_refused(self):
        for text in ("```\nls\n```\n", "```json\n{}\n```\n", "```cpp\nint x;\n```\n", "```sh\nls\n",
                     "<!-- test: setup\nls\n", "<!-- test: skip, why -->\ntext\n```sh\nls\n```\n", "<!-- test: skip, why -->\n",
                     "<!-- test: skip -->\n```sh\nls\n```\n", "<!-- test: sikp, why -->\n```sh\nls\n```\n"):
            with self.subTest(text), self.assertRaises(page.PageError):
                page.steps_of(text)

    def test_ordinary_comments_are_no_steps(self):
        self.assertEqual(page.steps_of("<!-- keys of job -->\ntext\n"), [])

    def test_tutorials_may_follow_each_other_in_one_folder(self):
        # Naive: each runs in a copy of its own, where nothing of another one lies in its way.
        made = {path.name: made_by(page.steps_of(path.read_text())) for path in (ROOT / "docs").glob("tutorial_*.md")}
        self.assertGreater(len(made), 2)
        for (one, names), (other, others) in itertools.combinations(made.items(), 2):
            self.assertGreater(len(names), 4, one)
            self.assertEqual(names & others, set(), f"{one} and {other} make the same")


if __name__ == "__main__":
    unittest.main(verbosity=1)
