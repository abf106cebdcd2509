#!/usr/bin/env python3
"""Which libtorch, with CUDA or without: what the build refuses, what it chooses where headers lack, what an installed copy says of it,
and what scripts/on_gpu refuses on a machine that is not the one it prepared for. Without a GPU.

Run by ctest after the test `install`, with
  TESSERA_PREFIX   the folder that `cmake --install` filled
  TESSERA_TORCH_PREFIX   the libtorch of this build
  TESSERA_HAS_CUDA   ON or OFF: what this build has
  TESSERA_WORK     an empty place
"""

import os
import pathlib
import re
import shutil
import subprocess
import tarfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PREFIX = pathlib.Path(os.environ["TESSERA_PREFIX"])
TORCH = pathlib.Path(os.environ["TESSERA_TORCH_PREFIX"])
WORK = pathlib.Path(os.environ["TESSERA_WORK"])

VERSION, VERSION_TO_29 = "include/torch/headeronly/version.h", "include/torch/csrc/api/include/torch/version.h"
# The file that is looked for in each wheel of NVIDIA.
RUNTIME, CRT, CCCL, NCCL = ("cuda_runtime_api.h", "crt/host_defines.h", "cccl/nv/target", "nccl.h")


def run(*words, **more):
    return subprocess.run(list(map(str, words)), capture_output=True, text=True, **more)


def write(folder, *names, text=""):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def torch_like(folder, cuda):
    """What of a libtorch the build looks at, of the version of ours."""
    libraries = ["lib/libtorch_cpu.so"] + ["lib/libtorch_cuda.so"] * cuda
    write(folder, "include/torch/csrc/api/include/torch/torch.h", *libraries)
    write(folder, VERSION, text=(TORCH / VERSION).read_text())
    return folder


def configure(folder, text, *options):
    write(folder, "CMakeLists.txt", text=text)
    done = run("cmake", "-S", folder, "-B", folder / "build", "-G", "Ninja", *options,
               env={name: value for name, value in os.environ.items()
                    if name not in ("CUDA_HOME", "NCCL_HOME", "TESSERA_TORCH")})
    return done.returncode, " ".join((done.stdout + done.stderr).split())


class Build(unittest.TestCase):
    PROJECT = f"""cmake_minimum_required(VERSION 3.25)
project(Choice LANGUAGES NONE)
list(APPEND CMAKE_MODULE_PATH {ROOT}/cmake)
include(TesseraTorch)
tessera_find_torch(CUDA ${{TESSERA_CUDA}})
include(TesseraCuda)
if(TARGET tessera_cuda_headers)
  get_target_property(found tessera_cuda_headers INTERFACE_INCLUDE_DIRECTORIES)
  message(STATUS "headers: ${{found}}")
endif()
"""

    def choose(self, choice, *headers, cuda=True):
        """With any toolkit of the machine: nothing outside of this folder is found."""
        folder = WORK / self._testMethodName / f"{choice}-{len(headers)}"
        shutil.rmtree(folder, ignore_errors=True)
        torch = torch_like(folder / "site-packages/torch", cuda)
        self.wheels = folder / "site-packages/nvidia/cu13/include"
        write(self.wheels, *headers)
        return configure(folder, self.PROJECT, f"-DTorch_DIR={torch}", f"-DTESSERA_CUDA={choice}",
                         f"-DCMAKE_FIND_ROOT_PATH={folder}", "-DCMAKE_FIND_ROOT_PATH_MODE_INCLUDE=ONLY")

    def test_all_headers_are_taken_from_the_wheels_next_to_torch(self):
        for choice in ("AUTO", "ON"):
            code, said = self.choose(choice, RUNTIME, CRT, CCCL, NCCL)
            self.assertEqual(code, 0, said)
            self.assertIn("CUDA: ON", said)
            self.assertIn(f"headers: {self.wheels};{self.wheels}/cccl;{self.wheels}", said)

    def test_what_torch_brings_without_the_other_headers_is_left_out_or_refused(self):
        # Naive: cuda_runtime_api.h is there, so there is CUDA, and the first source does not compile.
        for headers in ((RUNTIME, NCCL), (RUNTIME, CRT, NCCL), (RUNTIME, CRT, CCCL), ()):
            with self.subTest(headers):
                code, said = self.choose("AUTO", *headers)
                self.assertEqual(code, 0, said)
                self.assertIn("Built without CUDA: libtorch has CUDA, but its headers are not all there", said)
                self.assertIn("CUDA: OFF", said)
                code, said = self.choose("ON", *headers)
                self.assertNotEqual(code, 0)
                self.assertIn("TESSERA_CUDA is ON: libtorch has CUDA, but its headers", said)
                self.assertIn("nvidia-cuda-crt, nvidia-cuda-cccl", said)

    def test_a_libtorch_without_cuda_is_refused_where_it_is_asked_for(self):
        code, said = self.choose("AUTO", RUNTIME, CRT, CCCL, NCCL, cuda=False)
        self.assertEqual(code, 0, said)
        self.assertIn("CUDA: OFF", said)
        code, said = self.choose("ON", RUNTIME, CRT, CCCL, NCCL, cuda=False)
        self.assertNotEqual(code, 0)
        self.assertIn("without CUDA, expected one with libtorch_cuda.so", said)

    def test_off_is_off(self):
        code, said = self.choose("OFF", RUNTIME, CRT, CCCL, NCCL)
        self.assertEqual(code, 0, said)
        self.assertIn("CUDA: OFF", said)

    def test_another_word_is_refused(self):
        # Naive: what is neither ON nor OFF is AUTO, "no" too.
        code, said = self.choose("no", RUNTIME, CRT, CCCL, NCCL)
        self.assertNotEqual(code, 0)
        self.assertIn("TESSERA_CUDA: found no, expected AUTO, ON or OFF", said)


class Tree(unittest.TestCase):
    def test_a_libtorch_that_is_not_where_it_is_said_is_refused(self):
        # Naive: another one is taken, from .venv.
        for option in ("Torch_DIR", "TESSERA_TORCH"):
            folder, none = WORK / "tree" / option, WORK / "no torch"
            shutil.rmtree(folder, ignore_errors=True)
            options = [f"-DTorch_DIR={none}"] * (option == "Torch_DIR")
            done = run("cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={TORCH}", *options,
                       env={**os.environ, "TESSERA_TORCH": str(none)})
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(f"found no libtorch in {none} (and one in ", " ".join(done.stderr.split()))

    def test_an_older_libtorch_is_refused_and_a_newer_one_is_named(self):
        oldest, newest = re.findall(r"set\(TESSERA_TORCH_(?:OLDEST|NEWEST) (\d+\.\d+)\)",
                                    (ROOT / "cmake/TesseraTorch.cmake").read_text())
        for bound, step, expected in ((oldest, -1, "refused"), (oldest, 0, "taken"), (newest, 0, "taken"), (newest, 1, "named"),
                                      ("2.9", 0, "refused")):
            major, minor = map(int, bound.split("."))
            version = f"{major}.{minor + step}.3"
            with self.subTest(version):
                folder = WORK / "versions" / version
                shutil.rmtree(folder, ignore_errors=True)
                torch = torch_like(folder / "torch", cuda=False)
                # Up to 2.9 the version is in the other header, which later includes this one.
                write(torch, VERSION_TO_29, text="#include <torch/headeronly/version.h>\n")
                (torch / VERSION).unlink()
                write(torch, VERSION_TO_29 if bound == "2.9" else VERSION, text="".join(
                    f"#define TORCH_VERSION_{part} {number}\n" for part, number in
                    zip(("MAJOR", "MINOR", "PATCH"), version.split("."))))
                done = run("cmake", "-S", ROOT, "-B", folder / "build", "-G", "Ninja", f"-DTorch_DIR={torch}",
                           *(f"-DTESSERA_BUILD_{part}=OFF" for part in ("TESTS", "EXAMPLES", "BENCH")))
                said = " ".join(done.stderr.split())
                self.assertEqual(done.returncode != 0, expected == "refused", said)
                self.assertEqual(f"libtorch: found {version} in {torch}" in said, expected != "taken", said)
                if expected == "named":
                    self.assertIn(f"not known to build with ({oldest} to {newest} are known)", said)


class Package(unittest.TestCase):
    INSTALLED = next(PREFIX.glob("lib*/**/TesseraConfig.cmake"), pathlib.Path()).parent
    PROJECT = """cmake_minimum_required(VERSION 3.25)
project(Asks LANGUAGES CXX)
find_package(Tessera REQUIRED)
message(STATUS "with CUDA: ${TESSERA_CUDA}")
"""

    def find(self, folder, *torch):
        return configure(WORK / "package" / self._testMethodName, self.PROJECT, f"-DTessera_DIR={folder}",
                         f"-DCMAKE_PREFIX_PATH={';'.join(map(str, torch))}")

    def test_an_installed_copy_says_which_it_is(self):
        code, said = self.find(self.INSTALLED, TORCH)
        self.assertEqual(code, 0, said)
        self.assertIn(f"with CUDA: {os.environ['TESSERA_HAS_CUDA']}", said)

    def test_one_with_cuda_refuses_a_libtorch_without(self):
        folder = WORK / "package/with_cuda"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.INSTALLED, folder)
        config = folder / "TesseraConfig.cmake"
        config.write_text(config.read_text().replace("set(TESSERA_CUDA OFF)", "set(TESSERA_CUDA ON)"))
        without = torch_like(WORK / "package/cpu_torch", cuda=False)
        code, said = self.find(folder, without)
        self.assertNotEqual(code, 0)
        self.assertIn(f"needs the libtorch with CUDA with which it was built: found one without in {without}", said)


class OnGpu(unittest.TestCase):
    """scripts/on_gpu in a tree of its own, with a pack and a python3 that are made up."""

    def setUp(self):
        self.tree = WORK / "on_gpu" / self._testMethodName
        shutil.rmtree(self.tree, ignore_errors=True)
        for name in ("scripts/on_gpu", "scripts/settings.sh", "tests/CMakeLists.txt"):
            (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.tree / name)
        (self.tree / "tests/golden").symlink_to(ROOT / "tests/golden")

    def pack(self, version, said=""):
        """Of programs that say this, each as a shell does it."""
        folder = self.tree / "build/gpu"
        write(folder, "torch_version", text=version + "\n")
        write(folder, "commit", text="0123abcd\n")
        suites = re.search(r"^suites=\(([^)]*)\)", (ROOT / "scripts/on_gpu").read_text(), re.MULTILINE)[1].split()
        with tarfile.open(folder / "programs.tar.xz", "w:xz") as archive:
            for name in ("tessera", "test_gpu", *(f"test_{suite}" for suite in suites)):
                write(self.tree, f"bin/{name}", text=f"#!/bin/sh\necho '{said}'\n")
                (self.tree / "bin" / name).chmod(0o755)
                archive.add(self.tree / "bin" / name, f"bin/{name}")
            (self.tree / "lib").mkdir(exist_ok=True)
            archive.add(self.tree / "lib", "lib")
        return 1 + len(suites)

    def torch(self, version, sees_a_gpu=False):
        write(self.tree, "modules/torch/__init__.py", text=f"""__version__ = "{version}+cu130"
class cuda:
    is_available = staticmethod(lambda: {sees_a_gpu})
    mem_get_info = staticmethod(lambda: (2**36, 2**36))
    get_device_name = staticmethod(lambda: "a card")
    get_device_capability = staticmethod(lambda: (9, 0))
""")

    def on_gpu(self, *words):
        return run("bash", self.tree / "scripts/on_gpu", *words,
                   env={"PATH": os.environ["PATH"], "PYTHONPATH": str(self.tree / "modules"), "PYTHONNOUSERSITE": "1"})

    def refused(self, *words):
        done = self.on_gpu(*words)
        self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
        return done.stderr.splitlines()[-1]

    def test_programs_that_do_not_see_the_card_have_not_passed(self):
        # Naive: gtest ends with 0 where all of its tests are skipped.
        self.torch("2.11.0", sees_a_gpu=True)
        for said, code, word in (("[  PASSED  ] 3 tests.", 0, "passed"),
                                 ("no CUDA device: built without CUDA\n[  PASSED  ] 3 tests.", 1, "skipped")):
            programs = self.pack("2.11.0", said)
            done = self.on_gpu("check", "logs")
            self.assertEqual(done.returncode, code, done.stdout + done.stderr)
            table = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("test_")]
            self.assertEqual(table, [word] * programs)

    def test_another_torch_than_was_prepared_for_is_refused(self):
        self.pack("2.11.0")
        self.torch("2.13.0")
        for verb in ("check", "bench", "overlap"):
            self.assertEqual(self.refused(verb, "logs"), "on_gpu: found torch 2.13.0, expected 2.11.0, "
                             "for which build/gpu was made; prepare it again")

    def test_a_machine_without_a_gpu_is_refused(self):
        self.pack("2.11.0")
        self.torch("2.11.0")
        for verb in ("check", "bench", "overlap"):
            self.assertEqual(self.refused(verb, "logs"), "on_gpu: torch sees no GPU")

    def test_what_lacks_is_named(self):
        self.assertIn("no build/gpu; scripts/on_gpu prepare makes it", self.refused("check", "logs"))
        self.assertIn("found no LOGS", self.refused("bench"))
        self.pack("2.11.0")
        write(self.tree, "modules/torch/__init__.py", text="raise ImportError('none')\n")
        self.assertIn("cannot import torch", self.refused("check", "logs"))


if __name__ == "__main__":
    unittest.main(verbosity=1)
