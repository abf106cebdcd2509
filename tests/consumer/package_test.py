#!/usr/bin/env python3
"""scripts/package: a tarball and a wheel that run where there is no compiler, with the libtorch that they are for and with
no other; that packing again changes no byte; what pip installs and removes.

Run by ctest with TESSERA_BUILD, a build that is packed, and TESSERA_WORK, an empty place. With TESSERA_FULL=1 also what
compiles: a second build elsewhere, README's first program, `pip install .`.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import unittest
import venv
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORK = pathlib.Path(os.environ.get("TESSERA_WORK", ROOT / "build/full/package"))
BUILT = json.loads((pathlib.Path(os.environ["TESSERA_BUILD"]) / "built_for.json").read_text())
SITE = pathlib.Path(BUILT["folder"]).parent  # as a Python sees it: the packages next to torch
FULL = bool(os.environ.get("TESSERA_FULL"))
MODULE = f"_C.extension{sysconfig.get_config_var('EXT_SUFFIX')}"
HAS_MODULE = (pathlib.Path(os.environ["TESSERA_BUILD"]) / "python/tessera" / MODULE).is_file()
# Shards a Linear in a World of one, and steps.
TRAINS_IN_PYTHON = """
import sys, tessera
assert "torch" not in sys.modules, "import tessera has imported torch"
import torch
world = tessera.init()
model = tessera.fully_shard(torch.nn.Linear(4, 3))
before = dict(tessera.full_parameters(model))["weight"].clone()
loss = model(torch.ones(2, 4)).square().mean()
loss.backward()
tessera.AdamW(model, lr=0.1).step()
after = dict(tessera.full_parameters(model))["weight"]
assert world.size == 1 and after.shape == (3, 4) and not torch.equal(before, after)
print("stepped with", tessera.__version__)
"""
# As it looks to Python, with nothing in it that can be loaded.
OTHER_TORCH = "__version__ = '2.99.0+cpu'\nclass version:\n    cuda = None\n"
# A fresh machine has these; no compiler, no cmake, no git.
COMMANDS = ("sh", "env", "cat", "python3")
# The licences of the headers that are compiled into the program.
LICENCES = ("nlohmann-json3-dev", "libspdlog-dev", "libfmt-dev", "libxxhash-dev", "libgloo-dev", "libcli11-dev",
            "libtomlplusplus-dev")
CONFIG = """
[model]
config = "config.json"
[training]
steps = 2
seq_len = 16
local_batch_size = 2
[data]
path = "corpus.txt"
[optimizer]
lr = 1e-3
"""


def run(*words, **more):
    return subprocess.run(list(map(str, words)), capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False, **more)


def pack(folder, tree=None):
    how = (tree / "scripts/package", folder, "--no-apt") if tree else (
        ROOT / "scripts/package", folder, "--build", os.environ["TESSERA_BUILD"])
    done = run(*how)
    if done.returncode:
        raise AssertionError(done.stdout + done.stderr)
    return dict(reversed(line.split("  ")) for line in done.stdout.splitlines())


def fake_torch(folder, version, cuda):
    """As a libtorch looks from outside."""
    parts = zip(("MAJOR", "MINOR", "PATCH"), version.split("."))
    older = [*map(int, version.split("."))] < [2, 10]
    header = folder / f"include/torch/{'csrc/api/include/torch' if older else 'headeronly'}/version.h"
    header.parent.mkdir(parents=True)
    header.write_text("".join(f"#define TORCH_VERSION_{name} {number}\n" for name, number in parts))
    (folder / "lib").mkdir()
    for name in ("libtorch_cpu.so", "libtorch.so", *["libtorch_cuda.so"] * cuda):
        (folder / "lib" / name).write_text("no library")
    (folder / "__init__.py").write_text("raise SystemExit('imported')\n")


def metadata(**environment):
    """What python/torch_of_build.py gives scikit-build-core."""
    known = {name: value for name, value in os.environ.items() if name not in ("TESSERA_TORCH", "TESSERA_BUILT")}
    return run(sys.executable, "-c", "import json, torch_of_build; print(json.dumps(torch_of_build.dynamic_metadata({}, {})))",
               cwd=ROOT / "python", env={**known, "PYTHONDONTWRITEBYTECODE": "1", **environment})


class Packages(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        shutil.rmtree(WORK, ignore_errors=True)
        cls.packages = WORK / "packages"
        cls.hashes = pack(cls.packages)
        cls.wheel = next(cls.packages.glob("*.whl"))
        cls.tarball = next(cls.packages.glob("*.tar.gz"))
        cls.commands = WORK / "commands"
        cls.commands.mkdir()
        for name in COMMANDS:
            (cls.commands / name).symlink_to(shutil.which(name))
        cls.model = WORK / "model"
        cls.model.mkdir()
        (cls.model / "run.toml").write_text(CONFIG)
        shutil.copy2(ROOT / "configs/tiny/config.json", cls.model / "config.json")
        (cls.model / "corpus.txt").write_text("It is a truth universally acknowledged. " * 40)

    def environment(self, **more):
        return {"PATH": str(self.commands), "HOME": str(WORK), "OMP_NUM_THREADS": "1", **more}

    def unpacked(self, name):
        folder = WORK / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.assertEqual(run("tar", "-xzf", self.tarball, "-C", folder).returncode, 0)
        return next(folder.iterdir()).rename(folder / "tes sera")

    def environment_with(self, name, sees=None):
        """A fresh venv that sees the torch that is there, or a folder with another."""
        folder = WORK / name
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=False, symlinks=True)
        site = next(folder.glob("lib/python3*/site-packages"))
        (site / "there.pth").write_text(f"{sees or SITE}\n")
        return folder, site

    def pip(self, folder, *words):
        # That of the .venv, told where to install: a venv with a pip of its own takes 4 s.
        done = run(sys.executable, "-m", "pip", "--python", folder / "bin/python", *words, "--disable-pip-version-check", cwd=WORK)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def trains(self, *program, **environment):
        done = run(*program, "train", "run.toml", "--nproc", 2, "--job.dump_folder", WORK / "run", cwd=self.model,
                   env=self.environment(**environment))
        shutil.rmtree(WORK / "run", ignore_errors=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("step 2", done.stdout + done.stderr)

    def test_packing_the_same_build_again_gives_the_same_bytes(self):
        # Naive: it empties FOLDER/unpacked, with all that is kept there.
        mine = WORK / "again/unpacked/mine/kept"
        mine.parent.mkdir(parents=True)
        mine.write_text("kept")
        self.assertEqual(pack(WORK / "again"), self.hashes)
        self.assertEqual(mine.read_text(), "kept")
        self.assertEqual({path.name for path in (WORK / "again").iterdir()}, {*self.hashes, "unpacked"})

    def test_packing_that_fails_changes_nothing(self):
        # Naive: a half tarball has the name of a whole one.
        folder = WORK / "half"
        for path in (folder / "unpacked" / self.tarball.name.removesuffix(".tar.gz") / "of before", folder / self.tarball.name):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("before")
        before = sorted(folder.rglob("*"))
        done = run("bash", "-c", 'ulimit -f 1000 && exec "$@"', "-", ROOT / "scripts/package", folder, "--build", os.environ["TESSERA_BUILD"])
        self.assertNotEqual(done.returncode, 0)
        self.assertEqual(sorted(folder.rglob("*")), before)
        self.assertEqual((folder / self.tarball.name).read_text(), "before")

    def test_a_folder_that_cannot_be_one_is_refused(self):
        (WORK / "a file").write_text("")
        for folder, said in (("", "package: found an empty argument, expected a folder"),
                             (WORK / "a file", f"package: {WORK}/a file: found a file, expected a folder")):
            done = run(ROOT / "scripts/package", folder, "--build", os.environ["TESSERA_BUILD"])
            self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
            self.assertTrue(done.stderr.startswith(said), done.stderr)

    def test_a_tarball_runs_with_the_libtorch_that_it_is_for(self):
        copy = self.unpacked("tarball")
        program = copy / "bin/tessera"
        for name in ("lib/libtessera.a", "lib/cmake/Tessera/TesseraConfig.cmake", "include/tessera/tessera.h",
                     "share/tessera/configs/tiny.toml", "share/tessera/tools/chat.py", "share/licenses/tessera/LICENSE"):
            self.assertTrue((copy / name).exists(), name)
        for file in copy.rglob("*"):
            if file.is_file() and not file.is_symlink():
                self.assertNotIn(str(ROOT).encode(), file.read_bytes(), file)
        done = run(program, "--version", env=self.environment(TESSERA_TORCH=BUILT["folder"]))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, rf"^tessera \S+ \(git \w+\), torch {re.escape(BUILT['torch'])}\.")
        self.trains(program, TESSERA_TORCH=BUILT["folder"])
        # Next to it, within it, in the environment, by python3.
        (copy.parent / "torch").symlink_to(BUILT["folder"])
        self.assertEqual(run(program, "--version", env=self.environment()).stdout, done.stdout)
        (copy.parent / "torch").rename(copy / "libtorch")
        self.assertEqual(run(program, "--version", env=self.environment()).stdout, done.stdout)
        (copy / "libtorch").unlink()
        folder, _ = self.environment_with("sees")
        said = run(program, "--version", env=self.environment(PATH=f"{folder}/bin:{self.commands}"))
        self.assertEqual(said.stdout, done.stdout, said.stderr)
        said = run(program, "--version", env={"VIRTUAL_ENV": str(self.linked("linked")), "PATH": "/nowhere"})
        self.assertEqual(said.stdout, done.stdout, said.stderr)

    def linked(self, name):
        """A venv with the torch that is there in its own site-packages."""
        site = WORK / name / "lib/python3.11/site-packages"
        shutil.rmtree(WORK / name, ignore_errors=True)
        site.mkdir(parents=True)
        (site / "torch").symlink_to(BUILT["folder"])
        return WORK / name

    def test_libraries_of_another_libtorch_on_the_search_path_are_not_taken(self):
        copy = self.unpacked("search path")
        others = WORK / "others on the path"
        shutil.rmtree(others, ignore_errors=True)
        others.mkdir()
        stand_in = next(pathlib.Path("/lib").glob("*/libm.so.6"))
        for name in ("libc10.so", "libtorch.so", "libtorch_cpu.so", "libgomp.so.1"):
            (others / name).symlink_to(stand_in)
        self.trains(copy / "bin/tessera", TESSERA_TORCH=BUILT["folder"], LD_LIBRARY_PATH=str(others))

    def compiled(self, folder, name, text=""):
        """A library of one line."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "library.c").write_text(text)
        done = run("cc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", folder / name, folder / "library.c")
        self.assertEqual(done.returncode, 0, done.stderr)
        return folder / name

    def test_libraries_of_another_libtorch_are_refused_however_they_come(self):
        program = self.unpacked("other libraries") / "bin/tessera"
        other = self.compiled(WORK / "preloaded", "libc10.so")
        done = run(program, "--version", env=self.environment(TESSERA_TORCH=BUILT["folder"], LD_PRELOAD=str(other)))
        self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
        self.assertRegex(done.stderr, rf"^tessera: config: libtorch: found '{other}' loaded before it, expected [^\n]*LD_PRELOAD\n$")
        # The header of one, the libraries of another.
        torch = WORK / "mixed/torch"
        shutil.rmtree(torch.parent, ignore_errors=True)
        fake_torch(torch, f"{BUILT['torch']}.0", BUILT["cuda"])
        for name in ("libc10.so", "libc10_cuda.so", "libtorch.so", "libtorch_cuda.so"):
            self.compiled(torch / "lib", name)
        for number in (f"2UL << 56 | {99}UL << 48", None):
            function = f"unsigned long aoti_torch_abi_version(void) {{ return {number}; }}\n" if number else ""
            self.compiled(torch / "lib", "libtorch_cpu.so", function)
            done = run(program, "--version", env=self.environment(TESSERA_TORCH=str(torch)))
            self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
            self.assertRegex(done.stderr, rf"^tessera: config: libtorch: found {'2.99' if number else '0.0'} in "
                             rf"'{torch}/lib/libtorch_cpu.so', expected {BUILT['torch']}.0, as [^\n]*\n$")

    def test_an_executable_without_what_lies_next_to_it_says_so(self):
        alone = WORK / "alone"
        shutil.rmtree(alone, ignore_errors=True)
        alone.mkdir()
        shutil.copy2(self.unpacked("whole") / "bin/tessera", alone / "tessera")
        done = run(alone / "tessera", "--version", env=self.environment())
        self.assertEqual(done.returncode, 2)
        self.assertRegex(done.stderr, r"^tessera: io: [^\n]*built_for\.json'?: found none, expected [^\n]*link to[^\n]*\n$")
        self.assertNotIn("scripts/", done.stderr)  # a package has none
        for text, said in ((None, "io: cannot open "), ('{"torch": "", "cuda": false, "folder": ""}', "format: ")):
            (alone / "built_for.json").unlink(missing_ok=True)
            (alone / "built_for.json").symlink_to("built_for.json") if text is None else (alone / "built_for.json").write_text(text)
            done = run(alone / "tessera", "--version", env=self.environment())
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertRegex(done.stderr, rf"^tessera: {said}[^\n]*built_for\.json[^\n]*\n$")

    def test_a_library_that_is_cut_short_is_refused_by_its_bytes(self):
        # Naive: it is mapped, and the process ends by SIGBUS, silently.
        copy = self.unpacked("cut")
        torch = WORK / "cut torch/torch"
        shutil.rmtree(torch.parent, ignore_errors=True)
        (torch / "lib").mkdir(parents=True)
        (torch / "include").symlink_to(pathlib.Path(BUILT["folder"]) / "include")
        for library in (pathlib.Path(BUILT["folder"]) / "lib").glob("lib*.so*"):
            (torch / "lib" / library.name).symlink_to(library)
        program = copy / "lib/tessera/tessera_program.so"

        def refused(expected):
            done = run(copy / "bin/tessera", "--version", env=self.environment(TESSERA_TORCH=str(torch)))
            self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
            self.assertRegex(done.stderr, rf"^tessera: io: [^\n]*{expected}[^\n]*install it again\n$")

        for name in ("libc10.so", "libtorch_cpu.so", "libtorch.so", program.name):
            place = program if name == program.name else torch / "lib" / name
            whole = place.resolve()
            kept = place.with_name("whole")
            place.rename(kept)
            whole = whole if whole.exists() else kept
            size = whole.stat().st_size
            for left in (0, 100, 4097, size // 2, size - 100000 if size > 10**6 else size // 3):
                with self.subTest(f"{name}, {left} bytes"), whole.open("rb") as source:
                    with place.open("wb") as cut:
                        cut.write(source.read(min(left, 10000)))
                        cut.truncate(left)
                    refused(rf"{name}': found {left} (of \d+ bytes|bytes that are no library)")
            place.unlink()
            os.mkfifo(place)
            refused(f"{name}': found a folder or a device, expected a regular file")
            place.unlink()
            kept.rename(place)
        done = run(copy / "bin/tessera", "--version", env=self.environment(TESSERA_TORCH=str(torch)))
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_a_tarball_refuses_every_other_libtorch_by_name(self):
        copy = self.unpacked("refuses")
        major, minor = map(int, BUILT["torch"].split("."))
        for number, version in enumerate((f"{major}.{minor - 1}.0", f"{major}.{minor + 1}.1", f"{major + 1}.{minor}.0", "2.9.1")):
            with self.subTest(version):
                torch = WORK / f"others {number}/torch"
                shutil.rmtree(torch.parent, ignore_errors=True)
                fake_torch(torch, version, BUILT["cuda"])
                done = run(copy / "bin/tessera", "train", "run.toml", env=self.environment(TESSERA_TORCH=str(torch)))
                self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
                self.assertRegex(done.stderr, rf"^tessera: config: libtorch: found {re.escape(version)} [^\n]*, expected "
                                 rf"{re.escape(BUILT['torch'])}[ ,][^\n]*\n$")
                self.assertIn(str(torch), done.stderr)
        done = run(copy / "bin/tessera", "--version", env={**self.environment(), "PATH": "/nowhere"})
        self.assertEqual(done.returncode, 2)
        self.assertIn("libtorch: found none, expected ", done.stderr)
        # A file that only looks like it is an error of ours, too.
        torch = WORK / "others/torch"
        shutil.rmtree(torch.parent, ignore_errors=True)
        fake_torch(torch, f"{BUILT['torch']}.0", BUILT["cuda"])
        done = run(copy / "bin/tessera", "--version", env=self.environment(TESSERA_TORCH=str(torch)))
        self.assertEqual(done.returncode, 2)
        self.assertRegex(done.stderr, r"^tessera: io: [^\n]*libc10\.so[^\n]*install it again\n$")

    def test_a_wheel_trains_in_a_fresh_environment_without_network_and_compiler(self):
        folder, site = self.environment_with("fresh")
        before = set(site.iterdir())
        has_metadata = any(SITE.glob("torch-*.dist-info"))  # an unpacked libtorch has none
        for again in ((), ("--force-reinstall",)):
            self.pip(folder, "install", "--quiet", "--no-index", "--no-deps", *again, self.wheel)
            self.trains(folder / "bin/tessera")
        self.trains(folder / "bin/python", "-m", "tessera")
        # With its dependencies, which the torch that is there fulfils.
        if has_metadata:
            self.assertIn("already satisfied: torch", self.pip(folder, "install", "--no-index", self.wheel))
        self.assertIn("Requires: torch\n", self.pip(folder, "show", "tessera"))
        for name in ("share/tessera/configs/tiny.toml", *(f"share/licenses/tessera/{name}" for name in ("LICENSE", *LICENCES))):
            self.assertTrue((site / "tessera" / name).is_file(), name)
        self.pip(folder, "uninstall", "--quiet", "--yes", "tessera")
        shutil.rmtree(site / "tessera/__pycache__", ignore_errors=True)
        self.assertEqual({path for path in site.iterdir() if path.name != "tessera" or any(path.iterdir())}, before)
        self.assertFalse((folder / "bin/tessera").exists())

    def test_a_wheel_next_to_another_torch_says_so_and_does_not_import_it(self):
        sees = WORK / "other site"
        shutil.rmtree(sees, ignore_errors=True)
        fake_torch(sees / "torch", "2.99.0", BUILT["cuda"])
        folder, _ = self.environment_with("next to another", sees)
        self.pip(folder, "install", "--quiet", "--no-index", "--no-deps", self.wheel)
        for program in ((folder / "bin/tessera",), (folder / "bin/python", "-m", "tessera")):
            done = run(*program, "--version", env=self.environment())
            self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
            self.assertIn(f"libtorch: found 2.99.0 with{'' if BUILT['cuda'] else 'out'} CUDA in '{sees}/torch', the torch of the "
                          "Python that started it, expected ", done.stderr)
            self.assertEqual(done.stderr.count(str(sees)), 1, done.stderr)
            self.assertIn(f"pip install 'torch=={BUILT['torch']}.*'", done.stderr)
            # A torch that the user names comes before it, the active environment after it.
            for variables in ({"TESSERA_TORCH": BUILT["folder"]}, {"VIRTUAL_ENV": str(self.linked("active"))}):
                done = run(*program, "--version", env=self.environment(**variables))
                self.assertIn(f"torch {BUILT['torch']}.", done.stdout, done.stderr)
            done = run(*program, "--version", env=self.environment(TESSERA_TORCH=str(sees / "torch")))
            self.assertIn("which TESSERA_TORCH names", done.stderr)

    @unittest.skipUnless(HAS_MODULE, f"the build has no {MODULE}")
    def test_a_wheel_shards_a_module_in_a_fresh_environment(self):
        folder, _ = self.environment_with("in Python")
        self.pip(folder, "install", "--quiet", "--no-index", "--no-deps", self.wheel)
        done = run(folder / "bin/python", "-c", TRAINS_IN_PYTHON, cwd=WORK, env=self.environment())
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r"^stepped with [0-9.]+\n$")

    @unittest.skipUnless(HAS_MODULE, f"the build has no {MODULE}")
    def test_the_module_names_another_torch_and_none_before_it_is_opened(self):
        sees = WORK / "other Python"
        shutil.rmtree(sees, ignore_errors=True)
        sees.mkdir()
        folder, site = self.environment_with("other torch", sees)
        self.pip(folder, "install", "--quiet", "--no-index", "--no-deps", self.wheel)
        module = site / "tessera" / MODULE
        whole = module.read_bytes()
        module.write_bytes(b"no library")  # what opens it ends at once with another text
        program = "import tessera; print('imported'); tessera.fully_shard"
        # Known without torch, as tools ask for them; then each way to the module.
        known = "import tessera; print(tessera.__version__, hasattr(tessera, 'x'), 'fully_shard' in dir(tessera)); "
        imports = ("tessera.fully_shard", "from tessera import AdamW", "from tessera import _C", "import tessera._C",
                   "import importlib; importlib.import_module('tessera._C')")

        def refused(said, words):
            done = run(folder / "bin/python", "-c", known + words, cwd=WORK, env=self.environment())
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertRegex(done.stdout, r"^[0-9.]+ False True\n$")
            self.assertRegex(done.stderr.splitlines()[-1], f"^ImportError: tessera: {said}")

        expected = f"expected {re.escape(BUILT['torch'])}{' with CUDA' if BUILT['cuda'] else ''}[,;] .*pip install 'torch=={BUILT['torch']}.*'"
        torch = re.escape(f"{sees}/torch")
        for text, found in ((None, "no torch in this environment"), ("", rf"no whole torch in {torch} \(.*__version__.*\)"),
                            (OTHER_TORCH[:OTHER_TORCH.index("class")], rf"no whole torch in {torch} \(.*version.*\)"),
                            (OTHER_TORCH, rf"torch 2\.99\.0\+cpu without CUDA in {torch}")):
            if text is not None:
                (sees / "torch").mkdir(exist_ok=True)
            for words in imports:
                with self.subTest(found, words=words):
                    if text == "":  # a folder alone, as an uninstall may leave it
                        refused(f"found {found}, {expected}", words)
                    (sees / "torch/__init__.py").write_text(text) if text is not None else None
                    refused(f"found {found}, {expected}", words)
                    (sees / "torch/__init__.py").unlink(missing_ok=True)
        # One that fits as far as it is looked at; with CUDA where the build has none, too.
        (sees / "torch/__init__.py").write_text(f"__version__ = '{BUILT['torch']}.9+cu1'\nclass version:\n    cuda = '13.0'\n")
        for left in (0, 10, 100, 4097, len(whole) // 2, len(whole) - 100000):
            with module.open("wb") as cut:
                cut.write(whole[:left])
            refused(rf"{re.escape(str(module))}: found {left} (bytes that are no library|of {len(whole)} bytes)", "import tessera._C")
        (site / "tessera/_built.py").write_text("")
        done = run(folder / "bin/python", "-c", program, cwd=WORK, env=self.environment())
        self.assertRegex(done.stderr, r"ImportError: tessera: found [^\n]*_built\.py cut short or changed \([^\n]*\n$")
        (site / "tessera/_built.py").unlink()
        done = run(folder / "bin/python", "-c", program, cwd=WORK, env=self.environment())
        self.assertRegex(done.stderr, r"ImportError: tessera: found no extension module for Python [0-9.]+ in [^\n]*, expected [^\n]*\n$")

    def test_a_wheel_whose_program_is_not_whole_says_so(self):
        folder, site = self.environment_with("cut program")
        self.pip(folder, "install", "--quiet", "--no-index", "--no-deps", self.wheel)
        program = site / "tessera/lib/tessera/tessera"
        whole = program.read_bytes()

        def refused(said):
            for command in ((folder / "bin/tessera",), (folder / "bin/python", "-m", "tessera")):
                done = run(*command, "--version", env=self.environment())
                self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
                self.assertRegex(done.stderr, rf"^tessera: io: {re.escape(str(program))}: found {said}[^\n]*install it again\n$")

        for left in (0, 100, 4097, len(whole) // 2, len(whole) - 1):
            program.write_bytes(whole[:left])  # it stays executable
            refused(rf"{left} (bytes that are no library|of {len(whole)} bytes)")
        program.write_bytes(whole)
        program.chmod(0o644)
        refused(r"that it cannot be run \(Permission denied\)")
        program.unlink()
        refused(r"that it cannot be run \(No such file or directory\)")

    @unittest.skipUnless(FULL, "with TESSERA_FULL=1: it packs once more")
    def test_a_wheel_without_a_module_is_for_every_python_and_says_what_is_missing(self):
        build = WORK / "without a module"
        shutil.rmtree(build, ignore_errors=True)
        build.mkdir()
        for name in pathlib.Path(os.environ["TESSERA_BUILD"]).iterdir():
            if name.name != "python":
                (build / name.name).symlink_to(name)
        packages = WORK / "packages without a module"
        done = run(ROOT / "scripts/package", packages, "--build", build)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        wheel = next(packages.glob("*.whl"))
        self.assertIn("-py3-none-linux_", wheel.name)
        folder, _ = self.environment_with("of a build without a module")
        self.pip(folder, "install", "--quiet", "--no-index", "--no-deps", wheel)
        done = run(folder / "bin/python", "-c", "import tessera; tessera.init", cwd=WORK, env=self.environment())
        self.assertRegex(done.stderr, r"ImportError: tessera: found no extension module for Python [0-9.]+ in [^\n]*, expected [^\n]*\n$")
        self.trains(folder / "bin/tessera")

    def test_a_wheel_passes_over_what_is_no_package_and_says_that_its_working_directory_is_gone(self):
        folder, _ = self.environment_with("odd places")
        self.pip(folder, "install", "--quiet", "--no-index", "--no-deps", self.wheel)
        mine = WORK / "mine"
        mine.mkdir(exist_ok=True)
        (mine / "torch.py").write_text("raise SystemExit('imported')\n")
        for program in (f"'{folder}/bin/tessera'", f"'{folder}/bin/python' -m tessera"):
            done = run("sh", "-c", f"exec {program} --version", cwd=WORK, env=self.environment(PYTHONPATH=str(mine)))
            self.assertIn(f"torch {BUILT['torch']}.", done.stdout, done.stderr)
            # Naive: a traceback, or a fatal error of MKL that names a library which is there.
            done = run("sh", "-c", f"mkdir gone && cd gone && rmdir ../gone && exec {program} --version", cwd=WORK,
                       env=self.environment(PYTHONPATH=str(mine), PATH=f"{self.commands}:/usr/bin:/bin"))
            self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
            self.assertIn("tessera: io: working directory: found none (No such file or directory), expected ", done.stderr)
            self.assertNotIn("Traceback", done.stderr)

    def test_a_wheel_names_torch_as_a_dependency_unless_a_variable_chose_it(self):
        named = metadata(TESSERA_TORCH=BUILT["folder"])
        self.assertEqual(json.loads(named.stdout)["dependencies"], [], named.stderr)
        for more in ({}, {"TESSERA_TORCH": BUILT["folder"]}):
            built = metadata(TESSERA_BUILT=os.environ["TESSERA_BUILD"], **more)
            self.assertEqual(json.loads(built.stdout)["dependencies"], [f"torch=={BUILT['torch']}.*"], built.stderr)

    def test_a_wheel_is_built_with_a_torch_that_its_environment_only_sees(self):
        # Naive: in pip's build isolation (here -S) what the environment holds itself is looked at alone.
        folder, site = self.environment_with("only sees")
        asks = (folder / "bin/python", "-S", ROOT / "python/torch_of_build.py")
        done = run(*asks, cwd=WORK, env=self.environment(PYTHONNOUSERSITE="1", PYTHONPATH=str(WORK)))
        self.assertEqual(done.stdout, f"{BUILT['folder']}\n", done.stderr)
        (site / "there.pth").unlink()
        done = run(*asks, cwd=WORK, env=self.environment())
        self.assertNotEqual(done.returncode, 0)
        for word in ("install torch into this environment first", "--no-build-isolation", "TESSERA_TORCH"):
            self.assertIn(word, done.stderr)

    def test_a_wheel_is_not_built_with_a_torch_that_is_too_old(self):
        for version in ("2.9.1", "2.10.0"):
            torch = WORK / "too old" / version
            shutil.rmtree(torch, ignore_errors=True)
            fake_torch(torch, version, cuda=False)
            done = metadata(TESSERA_TORCH=str(torch))
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(f"tessera: found libtorch {version.rpartition('.')[0]} in {torch}, expected 2.", done.stderr)
            self.assertNotIn("Traceback", done.stderr)

    def test_a_build_folder_whose_description_is_broken_is_refused(self):
        build = WORK / "broken build"
        build.mkdir(exist_ok=True)
        for text in ("", "{}", '{"torch": ', '{"torch": "", "cuda": false}', '{"torch": "2.13"}', "[]", "\0"):
            (build / "built_for.json").write_text(text)
            done = run(ROOT / "scripts/package", WORK / "of a broken build", "--build", build)
            self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
            self.assertRegex(done.stderr, r"^package: [^\n]*built_for\.json: found [^\n]*\n$")

    def test_a_wheel_says_what_it_is_for(self):
        kind = "cuda" if BUILT["cuda"] else "cpu"
        python = "cp{0}{1}-cp{0}{1}".format(*sys.version_info) if HAS_MODULE else "py3-none"
        self.assertRegex(self.wheel.name, rf"^tessera-[0-9.]+\+torch{re.escape(BUILT['torch'])}\.{kind}-{python}-linux_\w+\.whl$")
        self.assertIn(f"torch{BUILT['torch']}-{kind}", self.tarball.name)
        with zipfile.ZipFile(self.wheel) as archive:
            names = archive.namelist()
            metadata = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
            built = json.loads(archive.read("tessera/lib/tessera/built_for.json"))
        self.assertIn(f"Requires-Dist: torch=={BUILT['torch']}.*\n", metadata)
        self.assertEqual(built, {**BUILT, "folder": ""})
        self.assertTrue(any(name.endswith("licenses/LICENSE") for name in names), names)
        self.assertFalse([name for name in names if name.startswith(("tests/", "tessera/bin/")) or "__pycache__" in name])
        self.assertIn("tessera/py.typed", names)
        self.assertEqual([name for name in names if name.endswith(".so")],
                         [f"tessera/{MODULE}"] * HAS_MODULE + ["tessera/lib/tessera/tessera_program.so"])

    def test_the_wheel_is_made_with_what_bootstrap_installs(self):
        needed = re.search(r'^requires = \["(.*)"\]$', (ROOT / "pyproject.toml").read_text(), flags=re.M)[1]
        self.assertIn(f"\npip_packaging=({needed})\n", (ROOT / "scripts/settings.sh").read_text())

    def test_the_image_runs_nothing_that_is_not_tried(self):
        lines = (ROOT / "Dockerfile").read_text().splitlines()
        self.assertEqual([line.removeprefix("RUN ") for line in lines if line.startswith("RUN ")],
                         ["scripts/bootstrap", "scripts/package"])
        # It starts without what belongs to this machine.
        self.assertLessEqual({"build", ".venv", ".cache", "outputs"}, set((ROOT / ".dockerignore").read_text().split()))
        # The places that it copies are where package and bootstrap leave things.
        copied = [line.split()[2] for line in lines if line.startswith("COPY --from=build")]
        self.assertEqual(copied, ["/tessera/build/packages/unpacked/*", "/tessera/.venv"])
        self.assertEqual(len(list((self.packages / "unpacked").iterdir())), 1)


@unittest.skipUnless(FULL, "with TESSERA_FULL=1: it compiles")
class Compiled(unittest.TestCase):
    def clone(self, folder):
        tree = WORK / folder
        shutil.rmtree(tree, ignore_errors=True)
        self.assertEqual(run("git", "clone", "--quiet", ROOT, tree).returncode, 0)
        return tree

    def test_two_builds_in_two_folders_give_the_same_packages(self):
        found = []
        for folder in ("one", "a/deeper one"):
            tree = self.clone(folder)
            (tree / ".venv").symlink_to(ROOT / ".venv")
            found.append(pack(WORK / "packed" / folder, tree))
        self.assertEqual(found[0], found[1])

    def test_the_first_program_of_the_readme_is_built_against_a_tarball(self):
        folder = WORK / "first program"
        shutil.rmtree(folder, ignore_errors=True)
        pack(folder / "packages")
        self.assertEqual(run("tar", "-xzf", next((folder / "packages").glob("*.tar.gz")), "-C", folder).returncode, 0)
        prefix = next(folder.glob("tessera-*")).rename(folder / "a prefix")
        blocks = re.findall(r"<!-- test: file (mine/\S+) -->\n```\w+\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
        self.assertEqual([name for name, _ in blocks], ["mine/main.cpp", "mine/CMakeLists.txt"])
        for name, text in blocks:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
        for words in (("-S", "mine", "-B", "mine/build", "-DCMAKE_BUILD_TYPE=Release",
                       f"-DCMAKE_PREFIX_PATH={prefix};{BUILT['folder']}"), ("--build", "mine/build")):
            done = run("cmake", *words, cwd=folder)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        done = run(folder / "mine/build/mine", 2, cwd=folder)
        self.assertRegex(done.stdout, r"step +50  loss 0\.0", done.stderr)

    def test_pip_installs_a_working_copy_with_the_torch_that_is_there(self):
        tree = self.clone("working copy")
        for options in ((), ("--no-build-isolation",)):
            with self.subTest(options):
                folder = WORK / "pip"
                shutil.rmtree(folder, ignore_errors=True)
                venv.create(folder, with_pip=True, symlinks=True)
                site = next(folder.glob("lib/python3*/site-packages"))
                pip = (folder / "bin/python", "-m", "pip", "install", "--disable-pip-version-check")
                if options:  # pip fetches nothing to build with
                    needed = re.findall(r'requires = \["(.*)"\]', (ROOT / "pyproject.toml").read_text())
                    self.assertEqual(run(*pip, *needed).returncode, 0)
                # Without torch it ends, and fetches none.
                done = run(*pip, *options, tree)
                self.assertNotEqual(done.returncode, 0)
                self.assertNotIn("Collecting torch", done.stdout)
                self.assertIn("install torch into this environment first", done.stdout + done.stderr)
                if options:
                    for name in SITE.iterdir():  # torch, and what it needs
                        if not (site / name.name).exists():
                            (site / name.name).symlink_to(name)
                else:  # seen, and not in the environment itself
                    (site / "there.pth").write_text(f"{SITE}\n")
                done = run(*pip, *options, tree)
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                self.assertNotIn("Collecting torch", done.stdout)
                done = run(folder / "bin/tessera", "--version", env={"PATH": "/usr/bin:/bin"})
                self.assertIn(f"torch {BUILT['torch']}.", done.stdout, done.stderr)
                done = run(folder / "bin/python", "-c", TRAINS_IN_PYTHON, cwd=WORK, env={"PATH": "/usr/bin:/bin"})
                self.assertEqual((done.returncode, done.stdout[:12]), (0, "stepped with"), done.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=1)
