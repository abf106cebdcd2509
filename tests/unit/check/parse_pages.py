"""Reads pages with a parser of XML and one of HTML: python3 parse_pages.py FOLDER.

Both have to find the same elements, no others than a page has, and nothing that loads or runs.
"""

import html.parser
import pathlib
import re
import sys
import xml.etree.ElementTree

ELEMENTS = set(
    "html head meta title style body header main footer h1 h2 h3 p ul li b span small code dl dt dd "
    "figure figcaption svg g rect line path text tspan div table caption thead tbody tr th td "
    "details summary".split()
)
ATTRIBUTES = set(
    "lang xmlns charset name content http-equiv class id role aria-labelledby aria-hidden tabindex "
    "scope x y x1 x2 y1 y2 dy width height viewBox preserveAspectRatio d fill".split()
)
EMPTY = {"meta", "rect", "line", "path"}


class Elements(html.parser.HTMLParser):
    """Lists the elements of a page as a browser would find them."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.found = []
        self.open = []

    def handle_starttag(self, tag, attrs):
        self.found.append(tag)
        if tag not in EMPTY:
            self.open.append(tag)
        for name, value in attrs:
            known = {one.lower() for one in ATTRIBUTES}
            assert name in known, f"attribute {name} of {tag}"
            assert name in ("xmlns", "content") or ":" not in value, f"{name}={value!r}"

    def handle_endtag(self, tag):
        if tag not in EMPTY:
            assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_comment(self, data):
        raise AssertionError(f"comment {data!r}")

    def unknown_decl(self, data):
        raise AssertionError(f"declaration {data!r}")

    def handle_pi(self, data):
        raise AssertionError(f"instruction {data!r}")


def check(page):
    text = page.read_text(encoding="utf-8")
    first, rest = text.split("\n", 1)
    assert first == "<!DOCTYPE html>", first
    elements = [one.tag.split("}")[-1] for one in xml.etree.ElementTree.fromstring(rest).iter()]
    parser = Elements()
    parser.feed(text)
    parser.close()
    assert not parser.open, f"{parser.open} are not closed"
    assert sorted(parser.found) == sorted(elements), "the parsers find other elements"
    strange = set(elements) - ELEMENTS
    assert not strange, f"elements {strange}"
    styles = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert len(styles) == 1, f"{len(styles)} styles"
    assert not re.search(r"url\(|@import|expression", styles[0]), "import of a style"
    assert all(c.isprintable() or c in "\n" for c in text), "characters that cannot be shown"


def main():
    pages = sorted(pathlib.Path(sys.argv[1]).glob("*.html"))
    failed = False
    for page in pages:
        try:
            check(page)
        except (AssertionError, xml.etree.ElementTree.ParseError, UnicodeDecodeError) as error:
            failed = True
            print(f"{page.name}: {error}")
    print(f"{len(pages)} pages")
    return failed


if __name__ == "__main__":
    sys.exit(main())
