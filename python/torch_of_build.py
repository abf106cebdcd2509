"""The libtorch that a wheel is for: that of the build TESSERA_BUILT, else the one of TESSERA_TORCH, else the package
torch of the environment that pip installs into, which need not be on sys.path (build isolation).

As a script it prints the folder. For scikit-build-core it gives version and dependencies, which name the minor version.
"""

import importlib.util
import json
import os
import pathlib
import re
import sys
import sysconfig

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Up to 2.9 the second one has the version; later it only includes the first.
HEADERS = ("include/torch/headeronly/version.h", "include/torch/csrc/api/include/torch/version.h")


def version_header(torch):
    """None where this is no libtorch."""
    headers = [torch / name for name in HEADERS if (torch / name).is_file()]
    return headers[0] if headers and (torch / "lib/libtorch_cpu.so").is_file() else None


def folder():
    """Raises SystemExit where there is none."""
    named = os.environ.get("TESSERA_TORCH")
    if named:
        places = [pathlib.Path(named).resolve()]
    else:
        # In pip's build isolation sys.path has nothing of the environment, and sysconfig still names it.
        found = importlib.util.find_spec("torch")
        places = [pathlib.Path(sysconfig.get_path(kind)) / "torch" for kind in ("platlib", "purelib")]
        places[:0] = [pathlib.Path(found.origin).parent] if found and found.origin else []
    for place in places:
        for one in (place, *place.parents[:3]):
            if version_header(one):
                return one
    looked = " or ".join(dict.fromkeys(map(str, places)))
    raise SystemExit(f"tessera: found no libtorch in {looked}, expected the one to build with; install torch into this "
                     "environment first, or set TESSERA_TORCH to the folder of a libtorch")


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
    # The one that TESSERA_TORCH names need not be pip's: a dependency would fetch another beside it.
    named = os.environ.get("TESSERA_TORCH") and not os.environ.get("TESSERA_BUILT")
    return {"version": f"{version}+torch{minor}.{kind}", "dependencies": [] if named else [f"torch=={minor}.*"]}


if __name__ == "__main__":
    sys.stdout.write(f"{folder()}\n")
