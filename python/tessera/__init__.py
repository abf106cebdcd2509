"""Tessera: sharded mixed-precision training on libtorch.

    import tessera
    tessera.init()
    for layer in model.layers:
        tessera.fully_shard(layer)
    tessera.fully_shard(model)

Shards any `torch.nn.Module` as FSDP2 does, with a dtype of its own for each parameter, gradient and sum. docs/python.md
is the manual. The package also carries the program: `tessera`, or `python -m tessera`.

Importing it imports no torch, nor do `dir(tessera)` and `tessera.__version__`: the first use of another name does, and
then looks whether it is the torch for which this package is built.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tessera._public import *  # noqa: F403
    from tessera._public import __all__ as __all__


def __getattr__(name: str) -> Any:
    nothing = AttributeError(f"module 'tessera' has no attribute '{name}'; dir(tessera) lists what it has")
    if name.startswith("_") and name not in ("__all__", "__version__"):  # a module of the package, or nothing
        raise nothing
    from tessera import _native

    if name == "__all__":
        return _native.names()
    if name == "__version__":
        return _native.version()
    if name not in _native.names():
        raise nothing
    from tessera import _public

    value = globals()[name] = getattr(_public, name)
    return value


def __dir__() -> list[str]:
    from tessera import _native

    return sorted({*globals(), *_native.names()})
