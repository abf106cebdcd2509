"""Runs the program that this package carries, with the torch of this Python."""

import importlib.util
import os
import pathlib
import sys


def main():
    program = pathlib.Path(__file__).resolve().parent / "lib/tessera/tessera"
    # Found, not imported: the program opens its libraries, and refuses those of another minor version.
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin:
        os.environ.setdefault("TESSERA_TORCH", str(pathlib.Path(torch.origin).parent))
    os.execv(program, ["tessera", *sys.argv[1:]])


if __name__ == "__main__":
    main()
