#!/usr/bin/env python3
"""A project outside of this tree uses an installed Tessera: configure, build, run, and what
find_package says where it cannot be used.

Run by ctest after the test `install`, with
  TESSERA_PREFIX   the folder that `cmake --install` filled
  TESSERA_TORCH_PREFIX   the libtorch of this build
  TESSERA_WORK     an empty place for the consumer's build
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import unittest

SOURCE = pathlib.Path(__file__).resolve().parent
PREFIX = pathlib.Path(os.environ["TESSERA_PREFIX"])
TORCH = os.environ["TESSERA_TORCH_PREFIX"]
WORK = pathlib.Path(os.environ["TESSERA_WORK"])


def run(*words, **more):
    return subprocess.run(list(map(str, words)), capture_output=True, text=True, **more)


def configure(folder, *prefixes, source=SOURCE, more=(), **environment):
    """As a user would; with ccache, where there is one, since libtorch's headers take their time."""
    shutil.rmtree(folder, ignore_errors=True)
    launcher = [f"-DCMAKE_CXX_COMPILER_LAUNCHER={shutil.which('ccache')}"] if shutil.which("ccache") else []
    known = {name: value for name, value in os.environ.items() if name != "TESSERA_TORCH"}
    return run("cmake", "-S", source, "-B", folder, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
               f"-DCMAKE_PREFIX_PATH={';'.join(map(str, prefixes))}", *launcher, *more, env={**known, **environment})


def other_torch(folder, minor, header="headeronly"):
    """As a libtorch looks to CMake."""
    for name, text in {"lib/libtorch_cpu.so": "", "include/torch/csrc/api/include/torch/torch.h": "",
                       f"include/torch/{header}/version.h": "#define TORCH_VERSION_MAJOR 2\n"
                       f"#define TORCH_VERSION_MINOR {minor}\n#define TORCH_VERSION_PATCH 0\n"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def project(name, text):
    """One that asks for Tessera."""
    folder = WORK / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "CMakeLists.txt").write_text(
        f"cmake_minimum_required(VERSION 3.25)\nproject(Asks LANGUAGES CXX)\n{text}\n")
    return folder


class Consumer(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        # One of an earlier run is linked with the library of then.
        (WORK / "build" / "consumer").unlink(missing_ok=True)

    def test_it_builds_without_warnings_and_trains_on_two_ranks(self):
        done = configure(WORK / "build", PREFIX, TORCH)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        done = run("cmake", "--build", WORK / "build", "-j", "2")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        done = run(WORK / "build" / "consumer", env={**os.environ, "OMP_NUM_THREADS": "1"})
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r"^2 ranks, loss \d\.\d+, then 0\.\d+\n$")

    def test_it_is_told_as_it_compiles_what_cannot_work(self):
        if not (WORK / "build" / "build.ninja").exists():
            done = configure(WORK / "build", PREFIX, TORCH)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        done = run("cmake", "--build", WORK / "build", "--target", "refused", "--", "-k", "0")
        self.assertNotEqual(done.returncode, 0)
        failed = re.split(r"^FAILED: ", done.stdout, flags=re.MULTILINE)[1:]
        sources = sorted((SOURCE / "refused").glob("*.cpp"))
        self.assertTrue(sources)
        for source in sources:
            with self.subTest(source.name):
                expected = source.read_text().splitlines()[0].removeprefix("// expected: ")
                said = [text for text in failed if source.name in text.splitlines()[0]]
                self.assertEqual(len(said), 1, done.stdout + done.stderr)
                errors = [line for line in said[0].splitlines() if "error:" in line]
                self.assertEqual(len(errors), 1, said[0])
                self.assertIn(expected, errors[0])

    def test_nothing_but_torch_and_threads_is_asked_of_a_user(self):
        targets = next(PREFIX.glob("lib*/**/TesseraTargets.cmake")).read_text()
        self.assertIn('INTERFACE_LINK_LIBRARIES "Tessera::torch;Threads::Threads"', targets)
        self.assertIn('INTERFACE_INCLUDE_DIRECTORIES "${_IMPORT_PREFIX}/include"', targets)

    def test_without_libtorch_find_package_says_what_is_missing(self):
        done = configure(WORK / "no_torch", PREFIX)
        self.assertNotEqual(done.returncode, 0)
        said = " ".join(done.stderr.split())
        self.assertIn("Tessera needs libtorch", said)
        self.assertIn("CMAKE_PREFIX_PATH", said)

    def test_another_libtorch_is_refused_with_both_versions(self):
        # Up to 2.9 its version is in another header.
        for number, (header, minor) in enumerate((("headeronly", 99), ("csrc/api/include/torch", 9))):
            other = other_torch(WORK / f"other_torch_{number}", minor, header)
            done = configure(WORK / f"wrong_torch_{number}", PREFIX, other)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(f"found 2.{minor}.0 in {other}", " ".join(done.stderr.split()))

    def test_a_target_torch_of_another_minor_version_is_refused(self):
        # Naive: any file of that name is taken, and the program is compiled with its headers.
        other = other_torch(WORK / "target/torch", 99)
        makes = f"""add_library(torch INTERFACE IMPORTED)
set_target_properties(torch PROPERTIES INTERFACE_INCLUDE_DIRECTORIES {other}/include)
"""
        done = configure(WORK / "target/build", PREFIX, TORCH,
                         source=project("target", makes + "find_package(Tessera REQUIRED)"))
        self.assertNotEqual(done.returncode, 0)
        self.assertIn(f"found the target torch of 2.99.0 ({other}/include)", " ".join(done.stderr.split()))
        # A project that continues without it continues.
        done = configure(WORK / "target/build", PREFIX, TORCH, source=project(
            "target", makes + "find_package(Tessera QUIET)\nfind_package(Tessera QUIET)\nmessage(STATUS \"found: ${Tessera_FOUND}\")"))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, "found: (FALSE|0)")

    @unittest.skipIf(list(pathlib.Path(TORCH).glob("lib/libtorch_cuda.so")), "find_package(Torch) wants NVIDIA's toolkit")
    def test_torch_is_found_before_and_after(self):
        # Naive: both make a target `torch`, and the second of them refuses that.
        orders = ("Torch REQUIRED)\nfind_package(Tessera", "Tessera REQUIRED)\nfind_package(Torch")
        for number, order in enumerate(orders):
            done = configure(WORK / f"order_{number}/build", PREFIX, TORCH, source=project(
                f"order_{number}", f"find_package({order} REQUIRED)\nfile(WRITE main.cpp \"int main() {{}}\")\n"
                "add_executable(mine main.cpp)\ntarget_link_libraries(mine Tessera::tessera ${TORCH_LIBRARIES})"))
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_libtorch_is_found_where_cmake_looks_for_packages(self):
        asks = project("places", 'find_package(Tessera REQUIRED)\nmessage(STATUS "torch in ${TORCH_INSTALL_PREFIX}")')
        for name in ("CMAKE_PREFIX_PATH", "Torch_DIR", "Torch_ROOT", "-DTorch_ROOT"):
            with self.subTest(name):
                variables, more = {name: f"/nowhere:{TORCH}" if name == "CMAKE_PREFIX_PATH" else TORCH}, ()
                if name.startswith("-D"):
                    variables, more = {}, (f"{name}={TORCH}",)
                done = configure(WORK / "places/build", PREFIX, source=asks, more=more, **variables)
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertIn(f"torch in {pathlib.Path(TORCH).absolute()}", done.stdout)

    def test_another_libtorch_that_is_loaded_ends_a_program_before_it_trains(self):
        # Naive: LD_LIBRARY_PATH comes before the folder that the program was linked with, and it trains with that one.
        if not (WORK / "build" / "consumer").exists():
            self.test_it_builds_without_warnings_and_trains_on_two_ranks()
        folder = WORK / "other_loaded"
        folder.mkdir(exist_ok=True)
        (folder / "other.c").write_text("unsigned long aoti_torch_abi_version(void) { return 2UL << 56 | 99UL << 48; }\n")
        self.assertEqual(run("cc", "-shared", "-fPIC", "-o", folder / "other.so", folder / "other.c").returncode, 0)
        done = run(WORK / "build" / "consumer", env={**os.environ, "LD_PRELOAD": str(folder / "other.so")})
        self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
        self.assertRegex(done.stderr, rf"libtorch: found 2\.99 in '{folder}/other\.so', expected 2\.\d+, with which this tessera was built")

    def test_another_minor_version_is_refused(self):
        source = project("asks_for_more", "find_package(Tessera 0.2 REQUIRED)")
        done = configure(WORK / "version", PREFIX, TORCH, source=source)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("0.2", done.stderr)

    def test_the_installed_program_finds_libtorch(self):
        environment = {name: value for name, value in os.environ.items()
                       if name not in ("LD_LIBRARY_PATH", "TESSERA_TORCH", "VIRTUAL_ENV")}
        done = run(PREFIX / "bin" / "tessera", "--version", env=environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("torch", done.stdout)

    def test_each_config_is_read_in_the_folder_where_configs_and_tools_lie(self):
        configs = sorted((PREFIX / "share/tessera/configs").glob("*.toml"))
        self.assertEqual([path.name for path in configs],
                         sorted(path.name for path in (SOURCE.parents[1] / "configs").glob("*.toml")))
        for path in configs:
            if path.name == "finetune.toml":  # wants a model's folder
                continue
            with self.subTest(path.name):
                done = run(PREFIX / "bin/tessera", "inspect", "--contract", f"configs/{path.name}", "--world", "64",
                           cwd=PREFIX / "share/tessera")
                self.assertEqual(done.returncode, 0, done.stderr)

    def test_the_tools_of_a_copy_that_was_moved_find_its_program(self):
        moved = WORK / "moved"
        shutil.rmtree(moved, ignore_errors=True)
        shutil.copytree(PREFIX / "share/tessera", moved / "share/tessera")
        chat = [sys.executable, moved / "share/tessera/tools/chat.py", "no_model"]
        done = run(*chat)
        self.assertEqual(done.returncode, 2)
        self.assertIn(f"--program: {moved / 'lib/tessera/tessera'} is not there", done.stderr)
        for name in ("bin", "lib/tessera"):
            shutil.copytree(PREFIX / name, moved / name, symlinks=True)
        done = run(*chat)
        self.assertEqual(done.returncode, 2)
        self.assertNotIn("--program", done.stderr)
        bare = run(sys.executable, "-S", moved / "share/tessera/tools/tokenize.py", "--model", "m", "--encode", "a")
        self.assertIn("-m pip install tokenizers\n", bare.stderr)  # there is no scripts/bootstrap

    def test_licences_come_along(self):
        self.assertIn("Apache License", (PREFIX / "share/licenses/tessera/LICENSE").read_text())


if __name__ == "__main__":
    unittest.main(verbosity=1)
