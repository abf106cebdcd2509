"""Opens the extension module, if it is whole and the torch that is there is the one that it is built for; the names and
the version of the package, which are known without torch."""

import ast
import functools
import importlib.machinery
import importlib.metadata
import importlib.util
import pathlib
import struct
import sys
from types import ModuleType

FOLDER = pathlib.Path(__file__).parent


@functools.cache
def names() -> list[str]:
    """Returns `__all__` of the module _public, which stands last in it: importing that needs torch."""
    source = (FOLDER / "_public.py").read_text()
    return list(ast.literal_eval(source.partition("\n__all__ = ")[2]))


def version() -> str:
    """Returns that of the package."""
    try:
        return built()[0]
    except ImportError:  # it carries the program alone, or is damaged
        return importlib.metadata.version("tessera").partition("+")[0]


def built() -> tuple[str, str, bool]:
    """Returns the version of the package, the minor version of its torch, and whether it is built with CUDA."""
    try:
        import tessera._built as _built

        return _built.VERSION, _built.TORCH, _built.CUDA
    except ModuleNotFoundError:
        raise _no_module() from None
    except (AttributeError, NameError, SyntaxError, ValueError) as error:
        raise ImportError(
            f"tessera: found {FOLDER / '_built.py'} cut short or changed ({error}), expected what the build writes; "
            "install it again"
        ) from None


def _no_module() -> ImportError:
    python = ".".join(map(str, sys.version_info[:2]))
    return ImportError(
        f"tessera: found no extension module for Python {python} in {FOLDER}, expected _C.extension.cpython-*.so; this "
        "package carries the program alone (python -m tessera). `pip install .` in a working copy builds the module "
        "with the torch of the environment and the headers of its Python (Debian: python3-dev)"
    )


def why_cut(file: pathlib.Path) -> str:
    """Says what is wrong where the file lacks bytes that its ELF header and its segments name; else returns "".

    What was cut short, as by a full disk, is mapped all the same, and ends the process where it is read. The same as
    src/loader/library_file.cpp for libraries of the program.
    """
    expected = "expected a whole copy; install it again"
    size = file.stat().st_size
    with file.open("rb") as opened_file:
        header = opened_file.read(64)
        if len(header) < 64 or header[:6] != b"\x7fELF\x02\x01":
            return f"{file}: found {size} bytes that are no library of this machine, {expected}"
        segments_at, sections_at = struct.unpack_from("<QQ", header, 32)
        segment_bytes, segments, section_bytes, sections = struct.unpack_from("<4H", header, 54)
        whole = max(segments_at + segment_bytes * segments, sections_at + section_bytes * sections)
        if whole <= size and segment_bytes == 56:
            opened_file.seek(segments_at)
            table = opened_file.read(segment_bytes * segments)
            ends = (sum(struct.unpack_from("<Q16xQ", table, 56 * number + 8)) for number in range(segments))
            whole = max(whole, *ends)
    return f"{file}: found {size} of {whole} bytes, {expected}" if whole > size else ""


def _require_torch(expected_minor: str, expected_cuda: bool) -> None:
    expected = f"{expected_minor}{' with CUDA' if expected_cuda else ''}"
    install = f"pip install 'torch=={expected_minor}.*'"
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"tessera: found no torch in this environment, expected {expected}; {install}") from None
    place = ", ".join(getattr(torch, "__path__", [str(getattr(torch, "__file__", ""))]))
    try:
        found, has_cuda = str(torch.__version__), torch.version.cuda is not None
    except AttributeError as error:  # as of a folder that an uninstall has left
        raise ImportError(
            f"tessera: found no whole torch in {place} ({error}), expected {expected}; remove it, and {install}"
        ) from None
    if ".".join(found.split("+")[0].split(".")[:2]) != expected_minor or (expected_cuda and not has_cuda):
        raise ImportError(
            f"tessera: found torch {found} {'with' if has_cuda else 'without'} CUDA in {place}, expected {expected}, "
            f"for which this package is built; {install}, or build tessera with that torch (docs/install.md)"
        )


def opened() -> ModuleType:
    """Returns the extension module, as `tessera._C`. Its file has a name that no import statement finds.

    torch keeps its C++ interface within a minor version alone. With another one the module could end at an undefined
    symbol when it is opened, or read fields where none are: so the versions are compared before.

    Errors: ImportError, where this package carries no module for this Python or not the whole of it, where there is no
    torch, and where the torch that is there has another minor version, or has no CUDA where the build has.
    """
    _, minor, cuda = built()
    _require_torch(minor, cuda)
    files = (FOLDER / f"_C.extension{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise _no_module()
    if why := why_cut(file):
        raise ImportError(f"tessera: {why}")
    loader = importlib.machinery.ExtensionFileLoader("tessera._C", str(file))
    module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec("tessera._C", loader, origin=str(file)))
    loader.exec_module(module)
    return module
