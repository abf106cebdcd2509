#!/usr/bin/env python3
"""What Doxygen reads of the public headers (scripts/reference.py): every line in its place, labels as paragraphs."""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import reference  # noqa: E402

HEADER = """// Box: holds a value. More of it.
//
//   Box box;
#pragma once

namespace detail {
int hidden();
}  // namespace detail

/// Holds a value. Errors, on all ranks: kUsage. Next: other.h.
class Box {
 public:
  Box(const Box&) = delete;
  ~Box();
  /// Moves it.
  Box(Box&&) = default;
  /// Adds to it, over
  /// lines. Collective, between steps. Errors:
  /// kIo.
  void add();
  int size() const;  ///< Collective: not a label here

 protected:
  int size_;
};
"""
READ = r"""/// Box: holds a value. More of it.
///
///     Box box;
/// \file





/** Holds a value. \labelled{Errors, on all ranks:} kUsage. \labelled{Next:} other.h. */
class Box {
 public:


  /** Moves it. */
  Box(Box&&) = default;
  /// Adds to it, over
  /// lines. \labelled{Collective}, between steps. \labelled{Errors:}
  /// kIo.
  void add();
  int size() const;  ///< Collective: not a label here

 private:
  int size_;
};
"""


class Reference(unittest.TestCase):
    def test_a_header_is_read_line_by_line(self):
        self.assertEqual([line.rstrip() for line in reference.as_read(HEADER)], READ.splitlines())

    def test_every_public_header_keeps_its_lines_and_stands_on_the_main_page(self):
        with tempfile.TemporaryDirectory() as folder:
            reference.write_input(pathlib.Path(folder))
            page = (pathlib.Path(folder) / "main.md").read_text()
            headers = sorted(reference.HEADERS.glob("*.h"))
            self.assertGreater(len(headers), 30)
            for header in headers:
                read = (pathlib.Path(folder) / "tessera" / header.name).read_text()
                self.assertEqual(read.count("\n"), header.read_text().count("\n"), header.name)
                self.assertEqual(page.count(f'\\ref {header.name} '), 1, header.name)

    def test_names_come_with_their_classes_and_places(self):
        with tempfile.TemporaryDirectory() as folder:
            tags = pathlib.Path(folder) / "names.xml"
            tags.write_text('<tagfile><compound kind="class"><name>tessera::Box</name><filename>box.html</filename>'
                            '<member kind="function"><name>add</name><anchorfile>box.html</anchorfile>'
                            '<anchor>a1</anchor></member></compound><compound kind="file"><name>box.h</name>'
                            '<member kind="function">'
                            "<name>make_box</name><anchorfile>box_h.html</anchorfile><anchor>a2</anchor></member>"
                            '</compound><compound kind="page"><name>index</name></compound></tagfile>')
            self.assertEqual(reference.names_of(tags), [
                ("Box", "box.html", "class"), ("Box::add", "box.html#a1", "function"),
                ("make_box", "box_h.html#a2", "function")])

    def test_types_are_listed_by_full_name_without_namespaces(self):
        rows = ['<tr id="0"><td class="entry"><b>tessera</b></td></tr>',
                *(f'<tr id="1"><td class="entry"><a class="el" href="{place}" target="_self">{name}</a></td></tr>'
                  for name, place in (("Roots", "r.html"), ("Box", "b.html")))]
        text = reference.types_by_name(f'<p><table class="directory">{"".join(rows)}</table></p>',
                                       {"r.html": "Stage::Roots", "b.html": "Box"})
        shown = rows[2] + "\n" + rows[1].replace(">Roots<", ">Stage::Roots<")
        self.assertEqual(text, f'<p><table class="directory">{shown}</table></p>')

    def test_without_doxygen_the_script_says_what_installs_it(self):
        with tempfile.TemporaryDirectory() as folder:
            for tool in ("bash", "dirname"):
                os.symlink(f"/bin/{tool}" if os.path.exists(f"/bin/{tool}") else f"/usr/bin/{tool}", f"{folder}/{tool}")
            done = subprocess.run(["bash", str(ROOT / "scripts/docs")], env={"PATH": folder}, capture_output=True,
                                  text=True, check=False)
            self.assertEqual(done.returncode, 3)
            self.assertIn("scripts/bootstrap --with-docs", done.stderr)


if __name__ == "__main__":
    unittest.main()
