"""Runs the program that this package carries, with the torch of this Python."""

import importlib.machinery
import os
import pathlib
import sys

from tessera import _native


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
    """Becomes the program, with the arguments of this process. One that is not there as a whole is refused as the
    program refuses its libraries: exit code 2, one line."""
    program = pathlib.Path(__file__).parent.resolve() / "lib/tessera/tessera"
    # Between the two alone: docs/install.md has the place that it takes in the program's list.
    os.environ["TESSERA_TORCH_OF_PYTHON"] = torch_of_python()
    try:
        why = _native.why_cut(program)
        if not why:
            os.execv(program, ["tessera", *sys.argv[1:]])
    except OSError as error:
        why = f"{program}: found that it cannot be run ({error.strerror}), expected a whole package; install it again"
    sys.stderr.write(f"tessera: io: {why}\n")
    sys.exit(2)


if __name__ == "__main__":
    main()
