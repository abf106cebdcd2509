#!/usr/bin/env python3
"""Checks that every page leads somewhere: relative links, their anchors, and paths named in backticks.

Pages are README.md, CONTRIBUTING.md, CHANGELOG.md and docs/**/*.md. A link is read from the folder of
its page; a path in backticks (`docs/compile.md`, `src/fsdp/`) from the root. An anchor is a heading of
the page that it names, spelt as GitHub spells it, or an id. Links with a scheme, as https, are left
alone. Prints one line for each fault; exit code 1 if there is any.

    scripts/check_links.py [ROOT]
"""

import glob
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md")
# A word in backticks that begins with one of these is a path of the repository.
FOLDERS = ("bench", "configs", "docs", "examples", "include", "python", "scripts", "src", "tests", "tools")
FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})")
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
INLINE = re.compile(r"\]\(\s*(?:<([^>]*)>|([^\s()]*(?:\([^\s()]*\)[^\s()]*)*))(?:\s+[\"'][^)]*)?\s*\)")
REFERENCE = re.compile(r"^ {0,3}\[[^\]^]+\]:\s*(\S+)", re.MULTILINE)
HTML = re.compile(r"<\w+\b[^>]*?\s(?:href|src|srcset)\s*=\s*[\"']([^\"']+)", re.IGNORECASE)
ID = re.compile(r"<\w+\b[^>]*?\s(?:id|name)\s*=\s*[\"']([^\"']+)", re.IGNORECASE)
HEADING = re.compile(r"^ {0,3}#{1,6}\s+(.*?)\s*#*\s*$")
SCHEME = re.compile(r"^[a-zA-Z][a-zA-Z0-9+.-]*:|^//")
PATH = re.compile(rf"(?:\.\./)*(?:{'|'.join(FOLDERS)})/[\w./*?{{}},+-]*(?:#[\w-]+)?")
BRACES = re.compile(r"\{([^{}]*)\}")
PLACEHOLDER = re.compile(r"(?<![A-Za-z])NAME(?![A-Z])")


def without_fences(text):
    """The text with the lines of fenced blocks emptied, so that numbers of lines stay."""
    lines, end = [], ""
    for line in text.splitlines():
        fence = FENCE.match(line)
        if end:
            if fence and fence.group(1).startswith(end) and not line.strip(" `~"):
                end = ""
            lines.append("")
        elif fence:
            end = fence.group(1)
            lines.append("")
        else:
            lines.append(line)
    return "\n".join(lines)


def blank(match):
    """As many line ends as the match has, and nothing else."""
    return "\n" * match.group(0).count("\n")


def anchors_of(text):
    """The anchors that a page offers: its headings, counted where they repeat, and ids of HTML."""
    found, seen = set(ID.findall(text)), {}
    for line in COMMENT.sub(blank, without_fences(text)).splitlines():
        heading = HEADING.match(line)
        if not heading:
            continue
        words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading.group(1))
        words = re.sub(r"<[^>]+>", "", words) if "`" not in words else words
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        count = seen.get(slug, 0)
        seen[slug] = count + 1
        found.add(f"{slug}-{count}" if count else slug)
    return found


def expanded(path):
    """The path with its braces written out: a/{b,c}.h is a/b.h and a/c.h."""
    braces = BRACES.search(path)
    if not braces:
        return [path]
    return [one for part in braces.group(1).split(",")
            for one in expanded(path[:braces.start()] + part + path[braces.end():])]


def targets_of(text):
    """(line, target, is in backticks) of everything on a page that leads to a place of the repository."""
    text = COMMENT.sub(blank, without_fences(text))
    for span in SPAN.finditer(text):
        words = span.group(2).split()
        if words and PATH.fullmatch(words[0]):
            yield text.count("\n", 0, span.start()) + 1, words[0], True
    # A link inside of backticks is shown, not followed; one around them is followed.
    text = SPAN.sub(lambda match: re.sub(r"[^\n]", "_", match.group(0)), text)
    for pattern in (INLINE, REFERENCE, HTML):
        for match in pattern.finditer(text):
            target = next((group for group in match.groups() if group is not None), "")
            if not SCHEME.match(target):
                yield text.count("\n", 0, match.start()) + 1, target, False


class Links:
    """The faults of a tree of pages."""

    def __init__(self, root):
        self.root = root
        self.anchors = {}

    def has_anchor(self, page, anchor):
        if page not in self.anchors:
            self.anchors[page] = anchors_of(page.read_text())
        return anchor in self.anchors[page]

    def stands_for(self, base, path):
        """Whether files have that pattern or placeholder (NAME), or that name with an ending (a program's)."""
        pattern = PLACEHOLDER.sub("*", path)
        return any(glob.glob(str(base / one)) for one in ([pattern] if pattern != path else [path, path + ".*"]))

    def fault(self, page, target, in_backticks):
        """Why the target leads nowhere; empty where it leads somewhere."""
        path, _, anchor = target.partition("#")
        if not path and not anchor:
            return "an empty link"
        # From a page's own folder, too: docs/measured/x.md may name `../../src/fsdp`.
        bases = (self.root, page.parent) if in_backticks else (page.parent,)
        for one in expanded(path):
            places = [page] if not one else [base / one for base in bases if (base / one).exists()]
            if not places:
                if in_backticks and any(self.stands_for(base, one) for base in bases):
                    continue
                return f"{one} is not there"
            if not places[0].resolve().is_relative_to(self.root):
                return f"{one} is outside of the repository"
            if anchor and places[0].suffix == ".md" and not self.has_anchor(places[0], anchor):
                return f"{one or page.name} has no heading #{anchor}"
        return ""

    def check(self):
        """(number of targets, faults as text)."""
        count, faults = 0, []
        for page in sorted({found for pattern in PAGES for found in self.root.glob(pattern)}):
            for line, target, in_backticks in targets_of(page.read_text()):
                count += 1
                why = self.fault(page, target, in_backticks)
                if why:
                    faults.append(f"{page.relative_to(self.root)}:{line}: {target}: {why}")
        return count, faults


def main():
    root = pathlib.Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT
    count, faults = Links(root).check()
    for fault in faults:
        print(fault)
    if count == 0:
        print("no link was found: the search is broken")
    return 1 if faults or count == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
