#!/usr/bin/env python3
"""README.md is short, and its first C++ block is a whole program (page_README builds and runs it). The pages that it
leads to list every public header, every model family and every page, and none that is not there."""

import pathlib
import re
import sys
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import page  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
API, FAMILIES, FEATURES, PAGES = (
    (ROOT / "docs" / name).read_text() for name in ("api.md", "families.md", "features.md", "README.md"))
WORDS = 1400  # some five minutes
HEADERS = {path.name for path in (ROOT / "include/tessera").glob("*.h")}


def rows_of_headers():
    """The first cell and the second of each row of the table that begins with | header |."""
    table = API.split("| header | |\n", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in row.strip("|").split("|", 1)] for row in table.splitlines()[1:]]


class ReadmePage(unittest.TestCase):
    def test_it_is_read_in_five_minutes(self):
        self.assertLessEqual(len(README.split()), WORDS)

    def test_the_list_of_pages_is_the_folder(self):
        pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
        self.assertEqual(pages - set(re.findall(r"\]\((\w+\.md)\)", PAGES)), set(), "pages that docs/README.md does not list")

    def test_the_table_of_headers_is_the_folder(self):
        names = [name for cell, _ in rows_of_headers() for name in re.findall(r"`(\w+\.h)`", cell)]
        self.assertEqual(sorted(names), sorted(set(names)), "a header stands in the table twice")
        self.assertEqual(HEADERS - set(names), set(), "headers without a row in docs/api.md")
        self.assertEqual(set(names) - HEADERS, set(), "rows of docs/api.md without a header")
        for cell, says in rows_of_headers():
            self.assertGreater(len(says), 10, cell)

    def test_tessera_h_brings_all_headers(self):
        included = re.findall(r'^#include "tessera/(\w+\.h)"$', (ROOT / "include/tessera/tessera.h").read_text(),
                              flags=re.M)
        self.assertEqual(sorted(included), sorted(HEADERS - {"tessera.h"}))

    def test_models_are_the_registry_of_families(self):
        registry = re.findall(r"^TESSERA_FAMILY\(\w+, (\w+), \w+\)", (ROOT / "src/models/families.def").read_text(),
                              flags=re.M)
        architectures = [re.search(r'\.architecture = "(\w+)"', (ROOT / f"src/models/{name}/{name}.cpp").read_text())[1]
                         for name in registry]
        self.assertGreater(len(architectures), 5)
        self.assertEqual(sorted(re.findall(r"`(\w+For\w+|\w+LMHeadModel)`", FAMILIES)), sorted(architectures))

    def test_pages_name_the_versions_of_libtorch_that_the_build_takes(self):
        bounds = re.findall(r"^set\(TESSERA_TORCH_(?:OLDEST|NEWEST) (\S+)\)", (ROOT / "cmake/TesseraTorch.cmake").read_text(),
                            flags=re.M)
        for name in ("README.md", "docs/install.md", "docs/cuda.md", "scripts/bootstrap"):
            found = re.findall(r"\b(2\.\d+) to (2\.\d+)\b", (ROOT / name).read_text())
            self.assertEqual(set(found), {tuple(bounds)}, name)

    def test_each_row_of_what_it_does_has_suites_in_test(self):
        table = FEATURES.split("## What it does\n\n", 1)[1].split("\n\n", 1)[0]
        rows = re.findall(r"^\| (\w[\w ]*) \|", table, flags=re.M)
        subjects = dict(re.findall(r"^(\w[\w ]*): (\w.*)$", (ROOT / "tests/subjects").read_text(), flags=re.M))
        self.assertGreater(len(rows), 10)
        self.assertEqual(rows, list(subjects))

    def test_the_first_cpp_block_is_a_whole_program_that_is_built_and_run(self):
        self.assertIn("int main(", README.split("```cpp\n", 1)[1].split("```", 1)[0])
        steps = [step for step in page.steps_of(README) if step.kind != "setup"]
        program = next(at for at, step in enumerate(steps) if step.kind == "cpp")
        folder = pathlib.Path(steps[program].file).parent
        self.assertEqual((steps[program].skip, steps[program].needs), ("", ""))
        self.assertIn(f"cmake --build {folder}/build", "".join(step.text for step in steps[program:] if not step.skip))
        self.assertIn("prints", [step.kind for step in steps[program:]])


if __name__ == "__main__":
    unittest.main(verbosity=1)
