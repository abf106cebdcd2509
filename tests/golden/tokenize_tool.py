"""Runs tools/tokenize.py in the test's own process, as the command does it: importing transformers takes
seconds. Used by tokenize_test.py and chat_templates_test.py."""

import contextlib
import io
import os
import pathlib
import runpy
import sys

TOOL = pathlib.Path(__file__).resolve().parents[2] / "tools/tokenize.py"


def run_tool(test, folder, model, *words, ok=True):
    """What it prints, in `folder`; where it has to be refused, the one line that says why."""
    out, err, before = io.StringIO(), io.StringIO(), (sys.argv, sys.path[:], os.getcwd())
    sys.argv = [str(TOOL), "--model", str(model), *map(str, words)]
    sys.path.insert(0, str(TOOL.parent))  # as Python does for a script
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_path(str(TOOL), run_name="__main__")
    except SystemExit as error:
        test.assertFalse(ok, err.getvalue())
        test.assertEqual(error.code, 2)
        test.assertRegex(err.getvalue(), r"\Atokenize: [^\n]+\n\Z")
        return err.getvalue()
    finally:
        sys.argv, sys.path[:] = before[0], before[1]
        os.chdir(before[2])
    test.assertTrue(ok, "was not refused")
    return out.getvalue()
