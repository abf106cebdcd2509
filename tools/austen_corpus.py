#!/usr/bin/env python3
"""Turns Debian's r-cran-janeaustenr into plain text files: OUT/train/*.txt and OUT/heldout/*.txt.

    tools/austen_corpus.py UNPACKED_PACKAGE OUT

The package (in Debian main; the novels are in the public domain, the R code is MIT) holds Jane
Austen's six novels as R character vectors, one string a line of the printed text, in R's lazy-load
database: a .rdx index and a .rdb of zlib pieces, each an object in R's XDR serialization. Only the
few kinds of object that such a file holds are read here, so R itself is not needed.

One novel is held out whole: a model that only learnt the training text by heart gains nothing on it.
Standard library only, because it runs before .venv exists.
"""

import hashlib
import pathlib
import struct
import sys
import zlib

HELD_OUT = "northangerabbey"
TRAIN = ("emma", "mansfieldpark", "persuasion", "prideprejudice", "sensesensibility")

# Of the text made from version 1.0.0 of the package. Another version still works, but the figures
# that ./run expects were measured with this text.
DIGEST = "65b434d16a8755142bfa95ba19c5f9abd0d30cf3dffe3b6793e834f9f56dcc96"

NIL, SYMBOL, PAIRLIST, CHARS, LOGICAL, INTEGER, REAL, STRINGS, LIST = (
    254, 1, 2, 9, 10, 13, 14, 16, 19)
REFERENCE = 255


class Reader:
    """One object in R's XDR serialization, versions 2 and 3."""

    def __init__(self, data):
        self.data, self.at, self.symbols = data, 0, []
        if self.take(2) != b"X\n":
            raise ValueError("not an R object in XDR form")
        version = self.int32()
        self.take(8)  # writer's version, oldest reader's version
        if version == 3:
            self.take(self.int32())  # name of the native encoding
        elif version != 2:
            raise ValueError(f"R serialization version {version} is not known")

    def take(self, count):
        if count < 0 or self.at + count > len(self.data):
            raise ValueError("the R object ends early")
        self.at += count
        return self.data[self.at - count:self.at]

    def int32(self):
        return struct.unpack(">i", self.take(4))[0]

    def item(self):
        flags = self.int32()
        kind, has_attributes, has_tag = flags & 0xFF, flags & 0x200, flags & 0x400
        if kind == NIL:
            return None
        if kind == SYMBOL:
            self.symbols.append(self.item())
            return self.symbols[-1]
        if kind == REFERENCE:
            return self.symbols[(flags >> 8 or self.int32()) - 1]
        if kind == PAIRLIST:
            if has_attributes:
                self.item()
            tag = self.item() if has_tag else None
            return {tag: self.item(), **(self.item() or {})}
        if kind == CHARS:
            size = self.int32()
            return None if size == -1 else self.take(size).decode("utf-8")
        count = self.int32()
        if kind in (LOGICAL, INTEGER):
            value = list(struct.unpack(f">{count}i", self.take(4 * count)))
        elif kind == REAL:
            value = list(struct.unpack(f">{count}d", self.take(8 * count)))
        elif kind in (STRINGS, LIST):
            value = [self.item() for _ in range(count)]
        else:
            raise ValueError(f"R object of type {kind} is not known here")
        attributes = self.item() if has_attributes else {}
        if kind == LIST and "names" in attributes:
            return dict(zip(attributes["names"], value))
        return value


def novels(package):
    """{name: list of lines} of every object in the package's data base."""
    found = sorted(package.rglob("janeaustenr/data/Rdata.rdx"))
    if not found:
        raise SystemExit(f"austen_corpus: no janeaustenr/data/Rdata.rdx under {package}")
    index = Reader(zlib.decompress(found[0].read_bytes(), wbits=47)).item()["variables"]
    store = found[0].with_suffix(".rdb").read_bytes()
    for name, (offset, length) in index.items():
        piece = store[offset:offset + length]
        text = Reader(zlib.decompress(piece[4:])).item()  # 4 bytes: length when unpacked
        yield name, text


def main(package, out):
    digest = hashlib.sha256()
    texts = dict(novels(package))
    for name in sorted((*TRAIN, HELD_OUT)):
        text = "\n".join(line.rstrip() for line in texts[name]).strip("\n") + "\n"
        folder = out / ("heldout" if name == HELD_OUT else "train")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
        digest.update(text.encode("utf-8"))
        print(f"{folder / name}.txt: {len(text.encode('utf-8'))} bytes")
    if digest.hexdigest() != DIGEST:
        print(f"austen_corpus: the text differs from the one that the expected figures were measured "
              f"with (sha256 {digest.hexdigest()})", file=sys.stderr)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
