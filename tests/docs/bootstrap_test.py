#!/usr/bin/env python3
"""scripts/bootstrap: what each set of options installs, builds and leaves alone.

Drawn options, seeded, compared with what the usage text says of them. What it starts (apt, pip, cmake) are stubs that
write down their words; that the real ones do it, newcomer_test.py shows.
"""

import os
import pathlib
import random
import re
import shlex
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SEED, DRAWS = 20261129, 64
# Writes its name and arguments into $CALLS, one argument a word as the shell would read it.
STUB = """#!/usr/bin/env bash
printf '%s\\n' "${0##*/}$(printf ' %q' "$@")" >>"$CALLS"
"""
TARGETS = (None, "library", "tessera", "all", "test_base")
# As they are typed from the folder `here` below `home`, and the folder that is meant.
PREFIXES = {"mine": "here/mine", "../mine of old": "mine of old", "a/b/../c": "here/a/c", "{home}/tessera": "tessera"}


def settings(name):
    """A list of scripts/settings.sh."""
    text = (ROOT / "scripts/settings.sh").read_text()
    return re.search(rf"^{name}=\(([^)]*)\)", text, re.MULTILINE)[1].split()


class Bootstrap(unittest.TestCase):
    def setUp(self):
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        self.home = pathlib.Path(made.name).resolve()
        self.tree = self.home / "tree"
        for name in ("scripts/bootstrap", "scripts/settings.sh", "cmake/TesseraTorch.cmake"):
            (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, self.tree / name)
        (self.home / "here").mkdir()
        stubs = ("apt-get", "sudo", "env", "cmake")
        for place in (*(f"stubs/{name}" for name in stubs), "tree/.venv/bin/python", "tree/.venv/bin/pip"):
            self.write(self.home / place, STUB)
        for name, says in (("id", "0"), ("nproc", "2"), ("dpkg-query", "un ")):
            self.write(self.home / "stubs" / name, f"#!/bin/sh\necho '{says}'\n")
        self.write(self.tree / ".venv/lib/python3.11/site-packages/torch/share/cmake/Torch/TorchConfig.cmake", "")

    @staticmethod
    def write(path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def bootstrap(self, *words, fresh=True, **environment):
        """(outcome, calls): what it says, and the words of what it started."""
        calls = self.home / "calls"
        calls.write_text("")
        if fresh:
            (self.tree / ".venv/tessera-pins").unlink(missing_ok=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TESSERA_")}
        done = subprocess.run(["bash", str(self.tree / "scripts/bootstrap"), *words], cwd=self.home / "here",
                              env=kept | {"PATH": f"{self.home}/stubs:{os.environ['PATH']}", "CALLS": str(calls)}
                              | environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        return done, [shlex.split(line) for line in calls.read_text().splitlines()]

    def draw(self, random):
        return {"tools": random.random() < 0.4, "packaging": random.random() < 0.3, "tests": random.random() < 0.3, "apt": random.random() < 0.5,
                "build": random.random() < 0.8, "target": random.choice(TARGETS),
                "prefix": random.choice([None, *PREFIXES])}

    def words_of(self, asked, random):
        options = [["--with-tools"] * asked["tools"], ["--with-packaging"] * asked["packaging"],
                   ["--with-tests"] * asked["tests"],
                   ["--no-apt"] * (not asked["apt"]), ["--no-build"] * (not asked["build"]),
                   ["--target", asked["target"]] * (asked["target"] is not None)]
        if asked["prefix"]:
            options.append(["--install", asked["prefix"].format(home=self.home)])
        random.shuffle(options)
        return [word for option in options for word in option]

    def expect_packages(self, asked, done, calls):
        wanted = settings("apt_build")
        wanted += settings("apt_python") * (asked["packaging"] or asked["tests"]) + settings("apt_tests") * asked["tests"]
        # apt-get runs as `env DEBIAN_FRONTEND=... apt-get`.
        installed = [call for call in calls if call[0] == "env" and "apt-get" in call]
        if asked["apt"]:
            self.assertEqual([call[-len(wanted):] for call in installed], [wanted])
            self.assertNotIn("clang-19" if not asked["tests"] else "", installed[0])
        else:
            self.assertEqual(installed, [])
            self.assertIn(f"apt-get install -y --no-install-recommends {' '.join(wanted)}\n", done.stderr)
        pips = [call for call in calls if "pip" in call]
        python = set()
        if asked["tools"] or asked["tests"]:
            python |= {*settings("pip_tools"), *settings("pip_with_torch")}
        if asked["packaging"] or asked["tests"]:
            python |= {*settings("pip_packaging")}
        if asked["tests"]:
            python |= {*settings("pip_tests")}
        ours = {*settings("pip_tools"), *settings("pip_with_torch"), *settings("pip_packaging"), *settings("pip_tests")}
        self.assertEqual([set(call) & ours for call in pips], [python] * bool(python))

    def expect_build(self, asked, calls):
        targets = [asked["target"]] if asked["target"] else ["all"] if asked["tests"] else ["library", "tessera"]
        built = [call for call in calls if call[:2] == ["cmake", "--build"]]
        expected = [["cmake", "--build", "--preset", "release", "--target", *targets]] if asked["build"] else []
        self.assertEqual([call[:5 + len(targets)] for call in built], expected)
        for call in built:
            self.assertEqual(call[5 + len(targets)], "-j")
        installed = [call for call in calls if call[:2] == ["cmake", "--install"]]
        if asked["prefix"] is None:
            self.assertEqual(installed, [])
            return
        component = {"library": ["--component", "library"], "tessera": ["--component", "program"]}
        self.assertEqual(installed, [["cmake", "--install", "build/release", "--prefix",
                                      str(self.home / PREFIXES[asked["prefix"]]),
                                      *component.get(asked["target"], [])]])
        self.assertGreater(calls.index(installed[0]), calls.index(built[0]))

    def test_drawn_options_install_and_build_what_they_say_and_nothing_else(self):
        draws = random.Random(SEED)
        seen = set()
        for _ in range(DRAWS):
            asked = self.draw(draws)
            words = self.words_of(asked, draws)
            with self.subTest(" ".join(words)):
                done, calls = self.bootstrap(*words)
                if asked["prefix"] and (not asked["build"] or asked["target"] == "test_base"):
                    self.assertEqual((done.returncode, calls), (2, []), done.stderr)
                    self.assertRegex(done.stderr, r"\Abootstrap: --install: found [^\n]+, expected [^\n]+\n\Z")
                    seen.add("refused")
                    continue
                self.assertEqual(done.returncode, 0, done.stderr)
                self.expect_packages(asked, done, calls)
                self.expect_build(asked, calls)
                seen.add(("installed" if asked["prefix"] else "built", asked["target"], asked["tests"]))
        self.assertGreater(len(seen), 15)

    def test_options_without_their_value_are_refused_before_anything_is_done(self):
        for option in ("--target", "--install"):
            for behind in ([], [""], ["--no-apt"]):
                done, calls = self.bootstrap(option, *behind)
                self.assertEqual((done.returncode, calls), (2, []), done.stderr)
                self.assertIn(f"bootstrap: {option}: found ", done.stderr)

    def test_a_prefix_that_cannot_be_a_folder_is_refused_before_anything_is_done(self):
        (self.home / "file").write_text("")
        for prefix in ("../file", "../file/below/it"):
            done, calls = self.bootstrap("--install", prefix)
            self.assertEqual((done.returncode, calls), (2, []), done.stderr)
            self.assertIn(f"found the file {self.home}/file, expected a folder", done.stderr)

    def test_with_another_libtorch_what_would_bring_torch_along_is_left_out_and_said(self):
        torch = self.home / "torch"
        self.write(torch / "share/cmake/Torch/TorchConfig.cmake", "")
        done, calls = self.bootstrap("--with-tools", TESSERA_TORCH=str(torch))
        self.assertEqual(done.returncode, 0, done.stderr)
        pips = [call for call in calls if "pip" in call]
        self.assertEqual([call[-len(settings("pip_tools")):] for call in pips], [settings("pip_tools")])
        self.assertIn(f"not installed, since pip would bring its own torch along: {' '.join(settings('pip_with_torch'))}",
                      done.stderr)

    def test_what_is_there_is_not_installed_again(self):
        for first, then in (("--with-tools", "--with-tools"), ("--with-tests", "--with-tools"), ("--with-tools", None),
                            ("--with-tests", "--with-packaging"), ("--with-packaging", None)):
            self.bootstrap(first, "--no-build")
            done, calls = self.bootstrap("--no-build", *([then] * bool(then)), fresh=False)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual([call for call in calls if "pip" in call], [])
            self.assertNotIn("pip install", done.stderr)
        # Options that share nothing, one after the other: each stays.
        self.bootstrap("--with-tools", "--no-build")
        self.bootstrap("--with-packaging", "--no-build", fresh=False)
        for option in ("--with-tools", "--with-packaging"):
            done, calls = self.bootstrap(option, "--no-build", fresh=False)
            self.assertEqual([call for call in calls if "pip" in call], [])

    def test_another_version_of_torch_takes_the_place_of_the_one_that_is_there(self):
        stamp = self.tree / ".venv/tessera-pins"
        self.bootstrap("--with-packaging", "--no-build")
        # Asked for the version that is there, it says that it is another.
        self.write(self.tree / ".venv/bin/python", f"{STUB}[[ $1 != - ]]\n")
        _, calls = self.bootstrap("--no-build", fresh=False, TESSERA_TORCH_VERSION="2.15.0")
        self.assertEqual([call[-1] for call in calls if "pip" in call], ["torch==2.15.0"])
        self.assertEqual(sorted(stamp.read_text().split()), sorted(["torch==2.15.0", *settings("pip_packaging")]))
        done, _ = self.bootstrap("--no-build", fresh=False)
        self.assertIn("torch==2.13.0 takes the place of torch==2.15.0, which is in .venv", done.stderr)

    def test_a_torch_that_the_build_would_refuse_is_refused_before_it_is_fetched(self):
        for version in ("2.9.0", "1.13.1", "2.15", "newest", "2.10.9"):
            done, calls = self.bootstrap(TESSERA_TORCH_VERSION=version)
            self.assertEqual((done.returncode, calls), (2, []), done.stderr)
            self.assertIn(f"bootstrap: TESSERA_TORCH_VERSION: found {version}, expected a version from ", done.stderr)
            self.assertEqual("the third number is missing" in done.stderr, version == "2.15", done.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=1)
