"""Every test that docs/fsdp2.md names exists, and every row of its tables has as many cells as its head."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def tests_in_sources():
    names = set()
    for path in (ROOT / "tests").rglob("*.cpp"):
        names.update(re.findall(r"^TEST(?:_P|_F)?(?:_ON_RANKS)?\((\w+),\s*(\w+)[,)]", path.read_text(), re.MULTILINE))
    return {f"{suite}.{name}" for suite, name in names}


def named(page):
    below = page.split("## Upstream's tests", 1)[1]
    return re.findall(r"`([A-Z]\w+\.[A-Z]\w+)`", below)


def broken_rows(page):
    width = 0
    for number, line in enumerate(page.splitlines(), 1):
        cells = line.count("|") - line.count("\\|")
        if cells == 0:
            width = 0
        elif width == 0:
            width = cells
        elif cells != width:
            yield number


def main():
    page = (ROOT / "docs/fsdp2.md").read_text()
    names = named(page)
    missing = sorted(set(names) - tests_in_sources())
    assert len(names) > 60, f"found {len(names)} names of tests, expected the table"
    assert not missing, f"docs/fsdp2.md names tests that do not exist: {missing}"
    rows = list(broken_rows(page))
    assert not rows, f"docs/fsdp2.md: rows with other numbers of cells than their head: lines {rows}"


if __name__ == "__main__":
    sys.exit(main())
