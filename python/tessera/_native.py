"""Opens the extension module `_C`, if the torch that is there is the one that it is built for."""

import importlib
import pathlib
import sys
from types import ModuleType


def opened() -> ModuleType:
    """Returns the module `_C`. `from tessera import _C` comes here.

    torch keeps its C++ interface within a minor version alone. With another one `_C` could end at an undefined symbol
    when it is opened, or read fields where none are: so the versions are compared before.

    Errors: ImportError, where this package carries no `_C` for this Python, where there is no torch, and where the
    torch that is there has another minor version, or has CUDA where the build has none, or the other way round.
    """
    folder = pathlib.Path(__file__).parent
    python = ".".join(map(str, sys.version_info[:2]))
    nothing = ImportError(
        f"tessera: found no extension module for Python {python} in {folder}, expected _C.cpython-*.so; this package "
        "carries the program alone (python -m tessera). `pip install .` in a working copy builds the module with the "
        "torch of the environment and the headers of its Python (Debian: python3-dev)"
    )
    try:
        import tessera._built as _built
    except ModuleNotFoundError:
        raise nothing from None
    expected = f"{_built.TORCH} {'with' if _built.CUDA else 'without'} CUDA"
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"tessera: found no torch in this environment, expected {expected}; pip install 'torch=={_built.TORCH}.*'"
        ) from None
    minor = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    has_cuda = torch.version.cuda is not None
    if (minor, has_cuda) != (_built.TORCH, _built.CUDA):
        raise ImportError(
            f"tessera: found torch {torch.__version__} {'with' if has_cuda else 'without'} CUDA in "
            f"{pathlib.Path(torch.__file__).parent}, expected {expected}, for which this package is built; "
            f"pip install 'torch=={_built.TORCH}.*', or build tessera with the torch that is there (docs/install.md)"
        )
    try:
        return importlib.import_module("tessera._C")
    except ModuleNotFoundError as error:
        if error.name != "tessera._C":
            raise
        raise nothing from None
