"""The unit of a sharded module: what it was made of, and one call of it, around the module's own.

Next: _module.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import _StopRecomputationError

from tessera import _C, _containers
from tessera._world import UNIT, usage_error

if TYPE_CHECKING:
    from ._module import FSDPModule

CONTENT = "_tessera_content"  # of a module's __dict__, next to UNIT


def is_sharded(module: nn.Module) -> bool:
    """Whether fully_shard was called with it, also where its World has closed."""
    return CONTENT in module.__dict__


def unit_of(module: nn.Module, what: str = "fully_shard") -> _C.Unit:
    """The unit of a sharded module. Raises tessera.Error of the kind "usage" where it has none."""
    unit = module.__dict__.get(UNIT)
    if unit is None:
        name = type(module).__name__
        if is_sharded(module):
            raise usage_error(f"{what}: found {name}, whose World has closed, expected an open one; call it before")
        raise usage_error(f"{what}: found {name}, which is not sharded, expected a module after fully_shard(module)")
    return cast(_C.Unit, unit)


def call(module: FSDPModule, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """function(*args, **kwargs) as one call of the module's unit.

    No variable here may hold a tensor of the result while `leave` looks at who does: the caller may change a result in
    place where no other unit has it.
    """
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        raise _transform_refused(module)
    unit_call = _C.UnitCall(unit_of(module, "forward"))
    module.__dict__[CONTENT].require_same()
    undo: list[Callable[[], None]] = []
    _calls.enter()
    try:
        tensors: list[Tensor] = []
        _containers.find(args, tensors)
        _containers.find(kwargs, tensors)
        replaced = unit_call.enter(tensors)
        del tensors
        if replaced is not None:
            places = iter(replaced)
            args = _containers.put(args, places, undo)
            kwargs = _containers.put(kwargs, places, undo)
            del places, replaced
        result = function(*args, **kwargs)
        tensors = []
        _containers.find(result, tensors)
        replaced = unit_call.leave(tensors)
        del tensors
        return result if replaced is None else _containers.put(result, iter(replaced), None)
    except _StopRecomputationError:
        unit_call.stop()
        raise
    except BaseException as error:
        unit_call.fail(f"{type(error).__name__}: {error}")
        raise
    finally:
        _calls.leave()
        for each in reversed(undo):
            each()


def _transform_refused(module: FSDPModule) -> Exception:
    return usage_error(
        f"{type(module).__name__}: found a call inside of torch.func (grad, vjp, jvp, vmap, jacrev and the like) or of "
        "forward-mode autograd, expected a plain one: a unit gathers for the backward of autograd and takes gradients "
        "from it, which those go past; call loss.backward(), or transform a plain module with the values of "
        "tessera.get_model_state_dict(module)"
    )


class _Calls:
    """Calls of units that are open: one thread at a time has any, since all of them use the same connections."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread = 0
        self._open = 0

    def enter(self) -> None:
        """Raises tessera.Error of the kind "usage" where another thread is in a call."""
        thread = threading.get_ident()
        with self._lock:
            if self._open > 0 and self._thread != thread:
                raise usage_error(
                    "forward: found a call of a sharded module while another thread is in one, expected one thread at "
                    "a time; let the threads take turns"
                )
            self._thread = thread
            self._open += 1

    def leave(self) -> None:
        with self._lock:
            self._open -= 1


_calls = _Calls()


class Content:
    """The parameters and children that a unit was made of, by the dicts of its modules."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._entries: list[tuple[dict[str, Any], str, Any]] = []
        self._sizes: list[tuple[dict[str, Any], int, nn.Module]] = []
        for module in modules:
            for entries in (module._parameters, module._modules):
                known = cast("dict[str, Any]", entries)
                self._entries.extend((known, key, value) for key, value in known.items())
                self._sizes.append((known, len(known), module))

    def require_same(self) -> None:
        """Raises tessera.Error of the kind "usage" naming what was replaced, or put in, after fully_shard."""
        for entries, key, value in self._entries:
            if entries.get(key) is not value:
                self._refuse(entries, key)
        for entries, size, _ in self._sizes:
            if len(entries) != size:
                known = {name for each, name, _ in self._entries if each is entries}
                for key, value in entries.items():
                    if key not in known and (isinstance(value, Tensor) or any(True for _ in value.parameters())):
                        self._refuse(entries, key)

    def _refuse(self, entries: dict[str, Any], key: str) -> NoReturn:
        module = next(each for known, _, each in self._sizes if known is entries)
        raise usage_error(
            f"{key} of {type(module).__name__}: found another one than fully_shard has seen, expected the same: what "
            "is put in afterwards would compute, and nothing would reduce its gradient; change the module before "
            "fully_shard, and values by load_state_dict() or by copying into parameters()"
        )


def _hide_from_dynamo() -> None:
    """torch.compile runs these as they are, without a look inside, and compiles what they call.

    As torch._dynamo.decorators.skip, but without importing Dynamo, which takes 70 MiB and a second of every process.
    """
    functions: tuple[Any, ...] = (
        _containers.find,
        _containers.put,
        _containers._is_dataclass,
        _containers._restore_item,
        _containers._restore_field,
        call,
        _Calls.enter,
        _Calls.leave,
        Content.require_same,
    )
    frames: Any = torch._C._dynamo.eval_frame
    for function in functions:
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
        frames.set_code_exec_strategy(function.__code__, skip)
        function._torchdynamo_disable = True


_hide_from_dynamo()
