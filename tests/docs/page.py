"""A Markdown page as the steps that a test takes.

Fenced blocks are run by their language: `sh` by bash, in the order of the page; `toml` is given to
`tessera train --print-config`; `text` shows output and is left alone. A block of another language (a C++
program, say) has to be the content of a file, which the page's own commands then use. A block without a
language is an error: it may have been meant to be run. HTML comments, which readers do not see, say what
else there is to know:

    <!-- test: skip, WHY -->           the next block is not run; the test lists it
    <!-- test: needs PROGRAM -->       the next block is skipped, and listed, where PROGRAM is missing; with a
                                       slash in it, where no file of the tree has that name (a pattern)
    <!-- test: file NAME -->           the next block, of any language, is the content of NAME
    <!-- test: prints REGEX -->        what the block before, if it has run, has printed matches it somewhere
    <!-- test: setup                   shell lines that stand for what a reader has or knows, such as
    cp README.md YOUR_TEXT.txt         a file of their own
    -->
"""

import dataclasses
import re

LANGUAGES = ("sh", "toml", "text")
COMMENT = re.compile(r"<!-- test: (\w+),? ?(.*)")
FENCE = re.compile(r"```(\w*)")


@dataclasses.dataclass
class Step:
    kind: str  # a language, "setup", or "prints"
    text: str
    line: int  # of the page, from 1
    skip: str = ""
    needs: str = ""
    file: str = ""


class PageError(Exception):
    """The page itself is wrong."""


def _until(lines, begin, end, what):
    for number in range(begin, len(lines)):
        if lines[number].rstrip() == end:
            return number
    raise PageError(f"line {begin}: {what} has no end ({end})")


def _block(language, text, line, notes):
    step = Step(language, text, line, **notes)
    if not language:
        raise PageError(f"line {line}: a block without a language, expected one of {', '.join(LANGUAGES)}")
    if language not in LANGUAGES and not (step.file or step.skip):
        raise PageError(f"line {line}: found a block of {language}, expected one of {', '.join(LANGUAGES)}, or a "
                        "name for it by <!-- test: file NAME -->")
    return step


def steps_of(page):
    """The steps of a page's text, in order."""
    lines = page.splitlines()
    steps, notes, at = [], {}, 0
    while at < len(lines):
        line, number = lines[at], at + 1
        if comment := COMMENT.match(line):
            kind, rest = comment.groups()
            if kind == "setup":
                end = _until(lines, at + 1, "-->", "a setup")
                steps.append(Step("setup", "\n".join(lines[at + 1:end]), number))
                at = end
            elif not rest.endswith("-->"):
                raise PageError(f"line {number}: expected --> at its end")
            elif kind in ("skip", "needs", "file"):
                notes[kind] = rest.removesuffix("-->").strip()
                if not notes[kind]:
                    raise PageError(f"line {number}: {kind} says nothing")
            elif kind == "prints":
                steps.append(Step("prints", rest.removesuffix("-->").strip(), number))
            else:
                raise PageError(f"line {number}: found {kind}, expected skip, needs, file, prints or setup")
        elif fence := FENCE.match(line):
            end = _until(lines, at + 1, "```", "a block")
            steps.append(_block(fence[1], "\n".join(lines[at + 1:end]), number, notes))
            notes, at = {}, end
        elif notes and line.strip():
            raise PageError(f"line {number}: expected the block that {' and '.join(notes)} is about")
        at += 1
    if notes:
        raise PageError(f"the page ends, expected the block that {' and '.join(notes)} is about")
    return steps
