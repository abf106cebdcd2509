#!/usr/bin/env python3
"""Makes what Doxygen reads, and finishes what it writes; scripts/docs calls it.

    scripts/reference.py input FOLDER     writes the public headers into FOLDER/tessera in the form that Doxygen
                                          reads, and the main page, every header with its first sentence
    scripts/reference.py finish FOLDER    adds the page of all names, with a field that narrows it, and takes away
                                          from Doxygen's pages what docs/reference/style.css has no use for

In the headers for Doxygen the head comment documents the file, and a sentence that begins with a label
(Errors:, Collective, Threads:, ...) is a paragraph of its own. Lines keep their numbers.
"""

import html
import pathlib
import re
import sys
import xml.etree.ElementTree as xml

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEADERS = ROOT / "include/tessera"
PARTS = ROOT / "docs/reference"
# The order of the main page; each public header stands in it once.
SUBJECTS = {
    "Ranks and meshes": ("world", "mesh", "mesh_shape", "group", "context", "interrupt"),
    "Sharded modules": ("shard", "forward_signature", "visit_tensors", "placement", "trainable"),
    "Training": ("optim", "optimizer_rule", "muon", "clip", "grad_scaler", "loss_scale"),
    "Dtypes and contracts": ("precision", "contract", "model_contract", "data_axes", "dtype", "dtype_watch",
                             "wide_scope"),
    "Steps and memory": ("step_scope", "recompute", "recompute_mode", "keep", "compile", "dry_run", "kernels_of"),
    "Pipelines": ("pipeline",),
    "Saving": ("checkpoint", "checkpoint_values", "state_dict"),
    "Errors and messages": ("error", "log_level", "tessera"),
}
# A sentence that begins so is a paragraph of its own, with the label in bold.
LABEL = re.compile(r"(?:^ ?|(?<=[.):`]) )((?:Errors|Collective|Threads|Memory|Bytes|Shapes|Units|Placement|State|"
                   r"Source|Next)(?:[^.:;]{0,60}:|(?=[.,])))")
COMMENT = re.compile(r"(\s*///)(?!<)(.*)")
# What a class has because C++ wants it said; a reader expects nothing else, unless a comment stands with it.
EXPECTED = re.compile(r"^\s*(?:~?\w+\(.*\)|\w+& operator=\(.*\)|bool operator==\(.*\) const)(?: noexcept)?"
                      r" = (?:default|delete);$"
                      r"|^\s*(?:virtual )?~\w+\(\)(?: override)?;$|^\s*(?:friend|class) \w[\w:]*;")


def labelled(text):
    """The text of a comment with its labels as the alias that begins a paragraph (docs/Doxyfile)."""
    return LABEL.sub(lambda found: f" \\labelled{{{found.group(1)}}}", text)


def as_read(text):
    """The lines of a header as Doxygen reads them."""
    at_head, in_detail = True, False
    lines = text.splitlines()
    for before, line, after in zip(["", *lines[:-1]], lines, [*lines[1:], ""], strict=True):
        if at_head and line.startswith("//"):
            comment = line[2:].removeprefix(" ")
            yield f"///   {comment}" if comment.startswith("  ") else f"/// {labelled(comment)}"
        elif at_head and line == "#pragma once":
            at_head = False
            yield "/// \\file"
        elif in_detail or line == "namespace detail {":
            in_detail = not line.startswith("}  // namespace detail")
            yield ""
        elif EXPECTED.match(line) and not COMMENT.match(before):
            yield ""
        else:
            comment = COMMENT.match(line)
            if not comment:
                # Protected members are for the classes that the library derives.
                yield line.replace(" protected:", " private:")
            elif COMMENT.match(before) or COMMENT.match(after):
                yield comment.group(1) + labelled(comment.group(2))
            else:  # Doxygen takes all sentences of a single line for the brief one, but not in a block.
                yield comment.group(1).replace("///", "/**") + labelled(comment.group(2)) + " */"


def first_sentence(header):
    """The first sentence of a header's head comment."""
    head = " ".join(line[2:].strip() for line in re.match(r"(?://.*\n)+", header.read_text()).group(0).splitlines())
    return re.split(r"(?<=\.)\s+(?=[A-Z])", head.split("  ")[0].strip(), maxsplit=1)[0]


def write_input(folder):
    """Writes the headers and the main page; a header that SUBJECTS lacks or has twice is an error."""
    listed = sorted(name for names in SUBJECTS.values() for name in names)
    there = sorted(path.stem for path in HEADERS.glob("*.h"))
    if listed != there:
        sys.exit(f"reference: SUBJECTS lists {listed}, expected each of {there} once")
    (folder / "tessera").mkdir(parents=True, exist_ok=True)
    page = ["# Tessera {#mainpage}", "", "The public headers, by subject. `tessera/tessera.h` includes all of them."
            " Start with world.h and shard.h."]
    for subject, names in SUBJECTS.items():
        page += ["", f"## {subject}", ""]
        for name in names:
            header = HEADERS / f"{name}.h"
            (folder / "tessera" / header.name).write_text("\n".join(as_read(header.read_text())) + "\n")
            page.append(f"- \\ref {name}.h \"{name}.h\": {first_sentence(header)}")
    (folder / "main.md").write_text("\n".join(page) + "\n")


def names_of(tagfile):
    """(name, place, kind) of every class and member, from the list that Doxygen writes for other tools."""
    found = set()
    for compound in xml.parse(tagfile).getroot():
        kind, scope = compound.get("kind"), ""
        if kind in ("class", "struct"):
            scope = compound.findtext("name").removeprefix("tessera::")
            found.add((scope, compound.findtext("filename"), kind))
        elif kind not in ("file", "namespace"):
            continue
        for member in compound.findall("member"):
            if member.findtext("anchorfile"):
                name = f"{scope}::{member.findtext('name')}" if scope else member.findtext("name")
                found.add((name, f"{member.findtext('anchorfile')}#{member.findtext('anchor')}", member.get("kind")))
    return sorted(found, key=lambda one: (one[0].lower(), one))


def types_by_name(text, names):
    """Doxygen's list of types without its rows of namespaces, by full name."""
    rows = {}
    for row in re.findall(r"<tr\b.*?</tr>", text, flags=re.DOTALL):
        place = re.search(r'<a class="el" href="([^"]+)"', row)
        if place and place.group(1) in names:
            name = names[place.group(1)]
            rows[name] = re.sub(r'(<a class="el"[^>]*>)[^<]*', rf"\g<1>{name}", row, count=1)
    table = "\n".join(rows[name] for name in sorted(rows, key=str.lower))
    return re.sub(r'(?<=<table class="directory">).*?(?=</table>)', lambda _: table, text, flags=re.DOTALL)


def finish(folder):
    """Writes names.html, and tidies Doxygen's pages."""
    names = names_of(folder.parent / "docs.input/names.xml")
    if not names:
        sys.exit("reference: found no names in names.xml")
    rows = "\n".join(f'<li><a href="{html.escape(where)}">{html.escape(name)}</a> <small>{kind}</small></li>'
                     for name, where, kind in names)
    page = "".join((PARTS / name).read_text() for name in ("header.html", "names.html", "footer.html"))
    for key, value in (("$title", "Names"), ("$projectname", "Tessera"), ("$relpath^", ""), ("$rows", rows),
                       ("$extrastylesheet", '<link href="style.css" rel="stylesheet"/>')):
        page = page.replace(key, value)
    (folder / "names.html").write_text(page)
    for path in folder.iterdir():
        if path.suffix in (".png", ".svg", ".js") or path.name in ("doxygen.css", "tabs.css"):
            path.unlink()
        elif path.suffix == ".html":
            text = path.read_text()
            if path.name == "annotated.html":
                text = types_by_name(text, {where: name for name, where, kind in names if kind in ("class", "struct")})
            text = re.sub(r" (?:File|Namespace|(?:Class|Struct)(?: Template)?) Reference(?=<| - )", "", text)
            for useless in ('<h2 class="groupheader"> </h2>', '<span class="mlabel">strong</span>'):
                text = text.replace(useless, "")
            path.write_text(re.sub(r'<div class="summary">.*?</div>', "", text, flags=re.DOTALL))


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("input", "finish"):
        sys.exit(__doc__)
    if sys.argv[1] == "input":
        write_input(pathlib.Path(sys.argv[2]))
    else:
        finish(pathlib.Path(sys.argv[2]))
