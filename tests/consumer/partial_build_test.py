#!/usr/bin/env python3
"""cmake --install of a build that has a part of what is installed: installs what is whole, or ends before it
writes anything and says what to do. With cmake/TesseraInstall.cmake as it is, around a program and a library of
one line.

Drawn, seeded: what is built, which component is asked for, and whether a copy is there already.
Run by ctest with TESSERA_WORK, an empty place.
"""

import itertools
import os
import pathlib
import random
import shutil
import subprocess
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORK = pathlib.Path(os.environ["TESSERA_WORK"])
SEED = 20261128
PROJECT = """cmake_minimum_required(VERSION 3.25)
project(Tessera VERSION 0.1.0 LANGUAGES CXX)
set(Torch_VERSION 2.13.0)
set(Torch_MINOR 2.13)
set(TESSERA_HAS_CUDA OFF)
set(TORCH_INSTALL_PREFIX /nowhere)
find_package(Threads REQUIRED)
add_library(Tessera::torch INTERFACE IMPORTED)
add_executable(tessera program.cpp)
add_library(tessera_program MODULE library.cpp)
set_target_properties(tessera_program PROPERTIES PREFIX "")
add_dependencies(tessera tessera_program)
foreach(folder . package)
  file(WRITE ${CMAKE_BINARY_DIR}/${folder}/built_for.json "{}")
endforeach()
add_library(tessera_base STATIC library.cpp)
include(cmake/TesseraInstall.cmake)
"""
# Files of an installed copy that each part has.
LIBRARY = {"lib/libtessera.a", "include/tessera/tessera.h", "lib/cmake/Tessera/TesseraConfig.cmake",
           "lib/cmake/Tessera/TesseraTargets.cmake", "lib/cmake/Tessera/TesseraTorch.cmake"}
PROGRAM = {"bin/tessera", "lib/tessera/tessera", "lib/tessera/tessera_program.so", "lib/tessera/built_for.json", *(str(pathlib.Path("share/tessera") / path.relative_to(ROOT))
                            for folder, kinds in (("configs", (".toml", ".json")), ("tools", (".py",)))
                            for path in (ROOT / folder).rglob("*") if path.suffix in kinds)}


def run(*words):
    return subprocess.run(list(map(str, words)), capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class PartialBuild(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        shutil.rmtree(WORK, ignore_errors=True)
        cls.source, cls.build = WORK / "source", WORK / "build"
        cls.source.mkdir(parents=True)
        for name in ("cmake", "include", "configs", "tools"):
            shutil.copytree(ROOT / name, cls.source / name)
        shutil.copy2(ROOT / "LICENSE", cls.source)
        (cls.source / "CMakeLists.txt").write_text(PROJECT)
        (cls.source / "program.cpp").write_text("int main() {}\n")
        (cls.source / "library.cpp").write_text("int one() { return 1; }\n")
        cls.strip, cls.full = WORK / "strip", WORK / "the disk is full"
        cls.strip.write_text(f"#!/bin/sh\n[ ! -e '{cls.full}' ] || exit 1\nexec '{shutil.which('strip')}' \"$@\"\n")
        cls.strip.chmod(0o755)
        for words in (("cmake", "-S", cls.source, "-B", cls.build, "-G", "Ninja", f"-DCMAKE_STRIP={cls.strip}"),
                      ("cmake", "--build", cls.build, "--target", "library", "tessera")):
            done = run(*words)
            if done.returncode:
                raise AssertionError(done.stdout + done.stderr)
        cls.made = {"library": next(cls.build.glob("**/libtessera.a")), "program": cls.build / "tessera"}
        cls.kept = {part: path.read_bytes() for part, path in cls.made.items()}

    def have(self, parts):
        """The build as it is once these parts, and no others, were built."""
        for part, path in self.made.items():
            path.unlink(missing_ok=True)
            if part in parts:
                path.write_bytes(self.kept[part])

    def install(self, prefix, component):
        return run("cmake", "--install", self.build, "--prefix", prefix, *(["--component", component] * bool(component)))

    def check(self, parts, component, prefix):
        before = files_of(prefix)
        self.have(parts)
        done = self.install(prefix, component)
        after, said = files_of(prefix), " ".join((done.stdout + done.stderr).split())
        asked = {component} if component else {"library", "program"}
        # Who links the library needs no program: without a component it is left out, and said.
        if asked - parts and (component or "library" not in parts):
            self.assertNotEqual(done.returncode, 0, said)
            self.assertEqual(after, before)
            targets = [target for part, target in (("library", "library"), ("program", "tessera"))
                       if part in asked - parts]
            self.assertIn(f"`cmake --build {self.build} --target {' '.join(targets)}`", said)
            self.assertIn(f"`scripts/bootstrap --install {prefix}`", said)
            return "refused"
        self.assertEqual(done.returncode, 0, said)
        whole, expected = asked & parts, set()
        for part, files in (("library", LIBRARY), ("program", PROGRAM)):
            if part in whole:
                expected |= files
            elif not before:
                self.assertEqual(set(after) & files, set())
        self.assertLessEqual(expected, set(after))
        if whole != asked:
            self.assertIn("Installs the library alone: found no ", said)
        return "installed"

    def test_an_installed_copy_is_whole_or_nothing_is_written(self):
        cases = [(set(parts), component, old) for count in range(3)
                 for parts in itertools.combinations(("library", "program"), count)
                 for component in (None, "library", "program") for old in (False, True)]
        random.Random(SEED).shuffle(cases)
        seen = []
        for number, (parts, component, old) in enumerate(cases):
            with self.subTest(built=sorted(parts), component=component, old=old):
                prefix = WORK / f"installed {number}"
                if old:
                    self.have({"library", "program"})
                    self.assertEqual(self.install(prefix, None).returncode, 0)
                else:
                    prefix.mkdir()
                seen.append(self.check(parts, component, prefix))
        self.assertEqual(set(seen), {"installed", "refused"})

    def test_a_strip_that_fails_ends_the_installation(self):
        # Naive: CMake does not look at how strip ended.
        self.have({"library", "program"})
        prefix = WORK / "stripped"
        install = ("cmake", "--install", self.build, "--prefix", prefix, "--component", "program", "--strip")
        done = run(*install)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertLess((prefix / "lib/tessera/tessera").stat().st_size, len(self.kept["program"]))
        shutil.rmtree(prefix)
        self.full.touch()
        done = run(*install)
        self.full.unlink()
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("lib/tessera/tessera: found that strip failed (1", " ".join((done.stdout + done.stderr).split()))


if __name__ == "__main__":
    unittest.main(verbosity=1)
