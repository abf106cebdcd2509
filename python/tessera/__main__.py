"""Runs the program that this package carries, with the torch of this Python."""

import importlib.machinery
import os
import pathlib
import sys


def main():
    program = pathlib.Path(__file__).resolve().parent / "lib/tessera/tessera"
    if not os.environ.get("TESSERA_TORCH"):
        # Found, not imported: the program opens its libraries, and refuses those of another minor version. The folder of
        # the command is no place for packages.
        places = [place for place in sys.path if place not in ("", os.getcwd())]
        torch = importlib.machinery.PathFinder.find_spec("torch", places)
        if torch is not None and torch.origin:
            os.environ["TESSERA_TORCH"] = str(pathlib.Path(torch.origin).parent)
    os.execv(program, ["tessera", *sys.argv[1:]])


if __name__ == "__main__":
    main()
