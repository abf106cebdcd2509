#!/usr/bin/env python3
"""Finds words of this project's own where the field has a term, and comments that are no sentences.

    scripts/check_words.py [FILE ...]      by default all text that git knows

Prints FILE:LINE: WORD, and the field's term. Exit code 1 where it finds any. A comment that begins
with "Of" or "What" is a fragment whose subject stands in the code below: few may remain.
"""
from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

# Regular expressions, without regard to case, and the terms to use. They match in identifiers, too.
WORDS = {
    r"\bput(s|ting)?[ _]off|_put_off": "deferred",
    r"beside(?!s)": "next to, in addition to, compared with",
    r"\b(give|gives|giving|gave|given)[ _]back": "reshard, free, return",
    r"stretch": "range, chunk",
    r"\b(owe|owes|owed|owing)(_|\b)": "pending, outstanding",
    r"kept[ _]labels?": "unmasked targets",
    r"(\b|_)(mail|parcel|desk)s?(_|\b)": "P2P send and receive, message, handle",
    r"\b(come|comes|came|coming)[ _]behind": "wait on the event, be ordered after",
    r"\b(go|goes|going|went)[ _]on\b": "resume, continue",
    r"\b(lend|lends|lent|lending|lenders?)\b|borrow": "owner of a shared parameter, shared",
    r"_in_words\b": "as text",
    r"\banew\b|\brelaid\b": "again, re-bucketed",
    r"without a word": "silently",
    r"what_passes|outlasts_": "transient, keeps_unsharded",
    r"(\b|_)touched(_|\b)": "dirty, modified, accessed",
    r"\bcrossings?\b": "enter and exit events",
    r"\bat rest\b": "decommitted",
    r"_apart\b|\bapart\(": "separate, on a helper thread",
    r"\bslips\b": "edits",
    r"\bwander(s|ing)?\b": "timings are noisy",
    r"\bdearest\b": "largest first",
    r"so[- ]many[- ]th\b|so many at a time": "every n-th, in chunks of n",
    r"\blook(s|ing)? on\b": "observers",
    r"\bnobody\b|\bwhoever\b|\bwhatever\b|vouche?s? for": "callers, any; no one, or the passive; untrusted",
    r"further ado": "by default",
    r"\bone's own\b|\brank's own\b": "custom; local to a rank",
    r"\bsaid once\b|\bwhich is said\b": "logged once",
    r"turns? the whole head": "rotary_dim == head_dim",
    r"what sees images": "the vision tower",
    r"allocator's eyes": "as the allocator records it",
    r"stands? on the shard": "is stored on the shard",
    r"\bmay do with\b": "may hold ... alone",
}
# Words of the format of plan files (docs/compile.md).
ALLOWED: dict[str, str] = {
    name: r"nobody|lenders"
    for name in (
        "src/capture/plan_json.cpp",
        "src/fsdp/agreed/step_plan.h",
        "tests/cli/plan_test.cpp",
        "tests/unit/capture/plan_json_test.cpp",
    )
}
FRAGMENT = re.compile(r"^\s*(///?<?|#|\*) (Of|What) ")
MOST_FRAGMENTS = 150
ENDS = (".cpp", ".h", ".py", ".md", ".toml", ".txt", ".cmake", ".sh", ".def", ".pyi")
LEFT_OUT = ("tests/golden/data/", "tests/corpus", "tests/fuzz/corpus", "scripts/check_words.py", "LICENSE")


def main(names: list[str]) -> int:
    if not names:
        names = subprocess.run(["git", "ls-files"], check=True, capture_output=True, text=True).stdout.split("\n")
    found, fragments = [], []
    for name in names:
        path = Path(name)
        if name.startswith(LEFT_OUT) or not path.is_file():
            continue
        if path.suffix not in ENDS and not name.startswith("scripts/") and name not in ("run", "test"):
            continue
        allowed = re.compile(ALLOWED[name]) if name in ALLOWED else None
        content = path.read_text(errors="replace")
        lines = content.split("\n")
        lowered = (allowed.sub("", content) if allowed else content).lower()
        for pattern, term in COMPILED:
            if not pattern.search(lowered):
                continue
            for number, line in enumerate(lowered.split("\n"), 1):
                for match in pattern.finditer(line):
                    found.append(f"{name}:{number}: '{match.group(0)}': {term}")
        for number, line in enumerate(lines, 1):
            if FRAGMENT.match(line):
                fragments.append(f"{name}:{number}: {line.strip()}")
    print("\n".join(found))
    if len(fragments) > MOST_FRAGMENTS:
        print("\n".join(fragments))
        print(f"{len(fragments)} comments begin with 'Of' or 'What', expected at most {MOST_FRAGMENTS}")
    return 1 if found or len(fragments) > MOST_FRAGMENTS else 0


COMPILED = [(re.compile(pattern), term) for pattern, term in WORDS.items()]
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
