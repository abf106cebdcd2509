"""Runs the program that this package carries, with the torch of this Python."""

import importlib.machinery
import os
import pathlib
import sys


def torch_of_python() -> str:
    """Returns the folder of the package torch, or "". It is not imported: the program opens its libraries.

    The folder of the command is no place for packages, and a file torch.py is none.
    """
    try:
        here = os.getcwd()
    except OSError:  # it is gone
        here = ""
    for place in sys.path:
        found = importlib.machinery.PathFinder.find_spec("torch", [place]) if place not in ("", here) else None
        if found is not None and found.origin and found.submodule_search_locations:
            return os.path.dirname(found.origin)
    return ""


def main() -> None:
    """Becomes the program, with the arguments of this process."""
    program = pathlib.Path(__file__).parent.resolve() / "lib/tessera/tessera"
    # Between the two alone: docs/install.md has the place that it takes in the program's list.
    os.environ["TESSERA_TORCH_OF_PYTHON"] = torch_of_python()
    os.execv(program, ["tessera", *sys.argv[1:]])


if __name__ == "__main__":
    main()
