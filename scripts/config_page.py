#!/usr/bin/env python3
"""The tables of docs/config.md, out of `tessera --help-keys`: one row a key, so that page and program
say the same.

    scripts/config_page.py            writes them, with build/release/tessera
    scripts/config_page.py --check    writes nothing; exit code 3 where the page is not up to date

TESSERA_PROGRAM names another program. A table stands between two marks in the page, and every section
of --help-keys needs its marks there; all other text is written by hand. Standard library only.
"""

import difflib
import os
import pathlib
import re
import subprocess
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "config.md"
END = "<!-- end of keys -->"
MARK = re.compile(r"<!-- keys of (.+?) -->\n.*?" + re.escape(END), re.DOTALL)
KEY = re.compile(r"  (\S+)  (.+?)(?: \(([^()]*)\))?, (?:default (.*)|(required.*))")


def help_text():
    program = os.environ.get("TESSERA_PROGRAM", str(ROOT / "build" / "release" / "tessera"))
    return subprocess.run([program, "--help-keys"], check=True, capture_output=True, text=True).stdout


def sections(text):
    """{section: [{"key", "type", "unit", "default", "meaning"}]} of --help-keys."""
    found, section = {}, "the top level"
    for line in text[text.index("Configuration keys"):].splitlines()[1:]:
        if header := re.fullmatch(r"\[(\w+)\]", line):
            section = header[1]
        elif line.startswith("      "):
            row = found[section][-1]
            row["meaning"] = (row["meaning"] + " " + line.strip()).strip()
        elif key := KEY.fullmatch(line):
            name, kind, unit, default, required = key.groups()
            found.setdefault(section, []).append(
                {"key": name, "type": kind, "unit": unit or "", "default": default or required, "meaning": ""})
        elif line.strip():
            raise SystemExit(f"config_page: cannot read this line of --help-keys: {line!r}")
    return found


def is_toml(text):
    try:
        tomllib.loads(f"x = {text}")
    except tomllib.TOMLDecodeError:
        return False
    return True


def table(rows):
    lines = ["| key | type | unit | default | meaning |", "|---|---|---|---|---|"]
    for row in rows:
        # Values as code; words as they are, unless Markdown would read a tag.
        code = is_toml(row["default"]) or "<" in row["default"]
        default = f"`{row['default']}`" if code else row["default"]
        cells = [f"`{row['key']}`", row["type"], row["unit"], default, row["meaning"]]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def filled(page, found):
    named = [mark[1] for mark in MARK.finditer(page)]
    if named != list(found):
        raise SystemExit(f"config_page: {PAGE.name} has marks for {named}, --help-keys has the sections {list(found)}; "
                         "every section needs `<!-- keys of NAME -->` and `<!-- end of keys -->`, in that order")
    return MARK.sub(lambda mark: f"<!-- keys of {mark[1]} -->\n{table(found[mark[1]])}\n{END}", page)


def main(arguments):
    if arguments not in ([], ["--check"]):
        raise SystemExit(__doc__)
    before = PAGE.read_text()
    after = filled(before, sections(help_text()))
    if not arguments:
        PAGE.write_text(after)
    elif before != after:
        sys.stdout.writelines(difflib.unified_diff(before.splitlines(True), after.splitlines(True),
                                                   "docs/config.md", "tessera --help-keys"))
        print("docs/config.md is not up to date: scripts/config_page.py writes it")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
