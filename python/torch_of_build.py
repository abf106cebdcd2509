"""The libtorch that a wheel is for: that of the build TESSERA_BUILT, else the one of TESSERA_TORCH, else the package
torch that the environment sees into which pip installs: in build isolation sys.path has nothing of it.

As a script it prints the folder. For scikit-build-core it gives version and dependencies, which name the minor version.
"""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import sysconfig

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Up to 2.9 the second one has the version; later it only includes the first.
HEADERS = ("include/torch/headeronly/version.h", "include/torch/csrc/api/include/torch/version.h")


def version_header(torch):
    """None where this is no libtorch."""
    headers = [torch / name for name in HEADERS if (torch / name).is_file()]
    return headers[0] if headers and (torch / "lib/libtorch_cpu.so").is_file() else None


def seen_outside():
    """The folder of the torch that this Python sees without what pip isolates a build by, which names its executable
    all the same: by a .pth file, in the system's packages or the user's. None where it sees none."""
    program = ("import sys; sys.path[:] = [place for place in sys.path if place]; import importlib.util as util; "
               "found = util.find_spec('torch'); print(found.origin if found and found.origin else '')")
    known = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONNOUSERSITE")}
    done = subprocess.run([sys.executable, "-c", program], env=known, capture_output=True, text=True, check=False)
    origin = done.stdout.strip()
    return pathlib.Path(origin).parent if origin else None


def folder():
    """Raises SystemExit where there is none."""
    named = os.environ.get("TESSERA_TORCH")
    if named:
        places = [pathlib.Path(named).resolve()]
    else:
        # In isolation sysconfig still names the environment.
        found = importlib.util.find_spec("torch")
        outside = pathlib.Path(found.origin).parent if found and found.origin else seen_outside()
        places = [outside] if outside else []
        places += [pathlib.Path(sysconfig.get_path(kind)) / "torch" for kind in ("platlib", "purelib")]
    for place in places:
        for one in (place, *place.parents[:3]):
            if version_header(one):
                return one
    looked = " or ".join(dict.fromkeys(map(str, places)))
    raise SystemExit(f"tessera: found no libtorch in {looked}, expected the one to build with; install torch into this "
                     "environment first, build with --no-build-isolation where it is there, or set TESSERA_TORCH to "
                     "the folder of a libtorch")


def minor_and_kind():
    """As ("2.13", "cpu")."""
    if built := os.environ.get("TESSERA_BUILT"):
        known = json.loads((pathlib.Path(built) / "built_for.json").read_text())
        return known["torch"], "cuda" if known["cuda"] else "cpu"
    torch = folder()
    header = version_header(torch).read_text()
    numbers = [re.search(rf"#define TORCH_VERSION_{part} (\d+)", header)[1] for part in ("MAJOR", "MINOR")]
    oldest = re.search(r"set\(TESSERA_TORCH_OLDEST (\S+)\)", (ROOT / "cmake/TesseraTorch.cmake").read_text())[1]
    if [*map(int, numbers)] < [*map(int, oldest.split("."))]:
        raise SystemExit(f"tessera: found libtorch {'.'.join(numbers)} in {torch}, expected {oldest} or newer")
    return ".".join(numbers), "cuda" if (torch / "lib/libtorch_cuda.so").is_file() else "cpu"


def dynamic_metadata(_settings, _project):
    minor, kind = minor_and_kind()
    version = re.search(r"project\(Tessera VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())[1]
    # The one that TESSERA_TORCH names need not be pip's: a dependency would fetch another one.
    named = os.environ.get("TESSERA_TORCH") and not os.environ.get("TESSERA_BUILT")
    return {"version": f"{version}+torch{minor}.{kind}", "dependencies": [] if named else [f"torch=={minor}.*"]}


if __name__ == "__main__":
    sys.stdout.write(f"{folder()}\n")
