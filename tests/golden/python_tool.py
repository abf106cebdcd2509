"""Runs a program of tools/ in the test's own process, as the command does it: importing transformers
takes seconds."""

import contextlib
import importlib
import io
import os
import pathlib
import runpy
import sys
import unittest.mock

TOOLS = pathlib.Path(__file__).resolve().parents[2] / "tools"


def needed(*names):
    """The modules of these names; leaves with 77 (skipped) where one is missing."""
    try:
        return [importlib.import_module(name) for name in names]
    except ImportError as missing:
        print(f"skipped: {missing}")
        sys.exit(77)


def run_tool(test, name, folder, *words, ok=True, says=""):
    """What it prints, in `folder`, of what standard input `says`, text or bytes; where it has to be refused, the one
    line that says why."""
    tool = TOOLS / name
    out, err, before = io.StringIO(), io.StringIO(), (sys.argv, sys.path[:], os.getcwd())
    sys.argv = [str(tool), *map(str, words)]
    sys.path.insert(0, str(TOOLS))  # as Python does for a script
    os.chdir(folder)
    try:
        with (contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
              unittest.mock.patch("sys.stdin", io.TextIOWrapper(io.BytesIO(
                  says if isinstance(says, bytes) else says.encode()), encoding="utf-8"))):
            runpy.run_path(str(tool), run_name="__main__")
    except SystemExit as error:
        test.assertFalse(ok, err.getvalue())
        test.assertEqual(error.code, 2)
        test.assertRegex(err.getvalue(), rf"\A{tool.stem}: [^\n]+\n\Z")
        return err.getvalue()
    finally:
        sys.argv, sys.path[:] = before[0], before[1]
        os.chdir(before[2])
    test.assertTrue(ok, "was not refused")
    return out.getvalue()
