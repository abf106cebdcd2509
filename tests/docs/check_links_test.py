#!/usr/bin/env python3
"""The link check (scripts/check_links.py) passes what leads somewhere, and names each link that does not."""

import pathlib
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "scripts"))
import check_links  # noqa: E402

OTHER = "# Other page\n## `run()` and *more*: 2.5\n## Twice\n## Twice\n<a id=\"own\"></a>\n```sh\n# no heading\n```\n"


class CheckLinks(unittest.TestCase):
    def faults(self, text):
        """(faults, number of targets) of a repository whose docs/page.md has that text."""
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder).resolve()
            for name, content in (("docs/page.md", text), ("docs/other.md", OTHER), ("src/a/x.h", ""), ("src/a/x.cpp", ""),
                                  ("src/b/b.cpp", "")):
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(content)
            own, others = check_links.Links(root).check(), len(list(check_links.targets_of(OTHER)))
            self.assertEqual(others, 0)
            return own[1], own[0]

    def test_what_is_there_passes_and_is_counted(self):
        good = ("[a](other.md)", "[a](../src/a/)", "[a](other.md#other-page)", "[a](other.md#run-and-more-25)", "[a](#top)",
                "[a](other.md#twice-1)", "[a](other.md#own)", "![a](../src/a/x.h \"title\")", "[a][b]\n\n[b]: other.md#twice",
                "<img width=\"3\" src=\"../src/a/x.h\">", "`docs/other.md`", "`docs/other.md#twice`", "`src/a/x.{h,cpp}`",
                "`src/a/*.h`", "`src/a/x`", "`src/NAME/NAME.cpp`", "`../src/a`", "`src/a/x.h --option`", "[a](<other.md>)",
                "[`src/a/x.h`](../src/b/b.cpp)")
        for link in good:
            found, count = self.faults(f"# Top\n{link}\n")
            self.assertEqual(found, [], link)
            self.assertGreater(count, 0, link)

    def test_each_that_leads_nowhere_is_named_with_its_line(self):
        bad = ("[a](missing.md)", "[a](src/a/x.h)", "[a](other.md#missing)", "[a](#missing)", "[a](other.md#twice-2)",
               "[a](other.md#no-heading)", "![a](missing.svg)", "[a][b]\n[b]: missing.md", "<img src=\"missing.svg\">",
               "<a href='missing.md'>", "`docs/missing.md`", "`docs/other.md#missing`", "`src/a/x.{h,py}`", "`src/a/*.py`",
               "`src/b/NAME.h`", "[a](../../outside.md)", "[a]()", "[![a](other.md)](missing.md)")
        for link in bad:
            found, _ = self.faults(f"# Top\n\nfirst line {link}\n")
            self.assertEqual(len(found), 1, link)
            self.assertRegex(found[0], r"^docs/page\.md:[34]: ", link)

    def test_what_is_no_link_of_the_repository_is_left_alone(self):
        for text in ("https://example.org/missing", "[a](https://example.org)", "[a](mailto:x@example.org)", "`[a](missing.md)`",
                     "```sh\ncat docs/missing.md `docs/missing.md`\n```", "<!-- [a](missing.md) -->", "`srcs/x`", "`docs`",
                     "`x = docs/missing.md`", "~~~\n[a](missing.md)\n```\n[b](missing.md)\n~~~"):
            self.assertEqual(self.faults(f"{text}\n"), ([], 0), text)


if __name__ == "__main__":
    unittest.main()
