#!/usr/bin/env python3
"""Runs the blocks of a page of the documentation in a clean copy of the tree (page.py says how).

    page_test.py PAGE        PAGE relative to the root of the tree

Run by ctest with TESSERA_BUILD, the build folder. A project that a page makes is built as its reader builds
it, but that warnings are errors and that ccache, where there is one, knows what was compiled before.
Leaves with 77 (skipped) where `transformers` is missing, as with TESSERA_TORCH.
"""

import importlib.util
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import clean_copy  # noqa: E402
import page  # noqa: E402

BLOCK_SECONDS = 1200
BUILD = pathlib.Path(os.environ["TESSERA_BUILD"])


class Failed(Exception):
    """A block does not do what the page says."""


class Runner:
    def __init__(self, folder):
        self.folder = folder
        self.environment = clean_copy.environment(folder, BUILD) | {"CXXFLAGS": "-Wall -Wextra -Werror"}
        if shutil.which("ccache"):
            self.environment |= {"CMAKE_CXX_COMPILER_LAUNCHER": "ccache", "CCACHE_BASEDIR": str(folder)}
        self.printed = ""
        self.skipped = []
        self.ran = True  # the block before

    def shell(self, text):
        process = subprocess.Popen(["bash", "-euo", "pipefail", "-c", text], cwd=self.folder, env=self.environment,
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   text=True, errors="replace", start_new_session=True)
        why = ""
        try:
            self.printed, _ = process.communicate(timeout=BLOCK_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the ranks that it has started, too
            self.printed, _ = process.communicate()
            why = f"did not end within {BLOCK_SECONDS} s"
        print(self.printed, end="", flush=True)
        if process.returncode:
            raise Failed(why or f"exit code {process.returncode}")

    def has(self, name):
        """Whether a program, or a file by a pattern with a slash, is there."""
        if "/" in name:
            return any(self.folder.glob(name))
        return shutil.which(name, path=self.environment["PATH"]) is not None

    def left_out(self, step):
        why = step.skip
        if step.needs and not self.has(step.needs):
            why = f"{step.needs} is not here"
        if why:
            self.skipped.append(f"line {step.line}: {why}")
        return bool(why)

    def take(self, step):
        if step.kind == "text":
            return
        if step.kind != "prints":
            self.ran = not self.left_out(step)
        if not self.ran:
            return
        print(f"--- line {step.line}: {step.kind} {step.file}\n{step.text}\n---", flush=True)
        if step.kind == "prints":
            if not re.search(step.text, self.printed):
                raise Failed(f"the block before did not print what matches {step.text!r}")
            return
        if step.file:
            (self.folder / step.file).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / step.file).write_text(step.text + "\n")
        if step.kind in ("sh", "setup") and not step.file:
            self.shell(step.text)
        elif step.kind == "toml":
            name = step.file or f".block_{step.line}.toml"
            (self.folder / name).write_text(step.text + "\n")
            self.shell(f"tessera train {name} --print-config >.printed || {{ cat .printed; exit 1; }}")


def main(name):
    if importlib.util.find_spec("transformers") is None:
        print("skipped: no transformers here")
        return 77
    try:
        steps = page.steps_of((clean_copy.ROOT / name).read_text())
    except page.PageError as error:
        raise SystemExit(f"{name}: {error}")
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place) / "tessera"
        clean_copy.make(folder, BUILD)
        runner = Runner(folder)
        for step in steps:
            try:
                runner.take(step)
            except Failed as error:
                raise SystemExit(f"{name}:{step.line}: {error}")
    taken = sum(step.kind not in ("text", "setup", "prints") for step in steps) - len(runner.skipped)
    print(f"{name}: {taken} blocks run, {len(runner.skipped)} left out")
    for line in runner.skipped:
        print(f"  {line}")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    sys.exit(main(sys.argv[1]))
