"""State dicts of whole tensors, in PyTorch's layout.

A dict that is taken from a sharded module is that of the plain module: plain modules load it, and other shardings do,
on any number of ranks. There is no DTensor. Next: _optim_state.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from tessera import _C
from tessera._module import FSDPModule
from tessera._options import checked, device_of, from_rank0, on_cpu
from tessera._unit import unit_of

_inside = threading.local()


def holds_whole() -> bool:
    """Whether this thread is in a state_dict() or load_state_dict() of a sharded module, whose tensors are whole."""
    return getattr(_inside, "depth", 0) > 0


@dataclasses.dataclass
class _Place:
    """An entry of `_parameters` or `_buffers` for which a whole tensor stands in."""

    entries: dict[str, Tensor | None]
    key: str
    own: Tensor
    stand_in: Tensor
    canonical: str | None  # the library's name of a parameter or buffer that it has; None: Python alone has it


@contextlib.contextmanager
def _standing_in(places: list[_Place]) -> Iterator[None]:
    """The stand-ins are in their places; at the end the module has its own again."""
    _inside.depth = getattr(_inside, "depth", 0) + 1
    try:
        for place in places:
            place.entries[place.key] = place.stand_in
        yield
    finally:
        _inside.depth -= 1
        for place in places:
            place.entries[place.key] = place.own


def _plain_method(module: nn.Module, name: str) -> Any:
    """The method of the module's own class."""
    return getattr(super(FSDPModule, module), name)


def whole_parameters(unit: _C.Unit, keep: bool = True) -> dict[str, Tensor]:
    """Whole values of all parameters by their canonical names, copies; {} on a rank without `keep`. Collective."""
    names = {part.contract: part.name for part in _C.parameter_parts(unit)}
    return {names[contract]: values for contract, values in unit.full_parameters(None if keep else set())}


def _parameter(values: Tensor, requires_grad: bool) -> nn.Parameter:
    trained = requires_grad and (values.is_floating_point() or values.is_complex())
    return nn.Parameter(values, requires_grad=trained)


def whole_state_dict(
    module: nn.Module,
    prefix: str = "",
    keep_vars: bool = False,
    destination: dict[str, Any] | None = None,
    *,
    keep: bool = True,
) -> dict[str, Any]:
    """The state dict of the plain module, whole tensors, copies, on every rank that has `keep`; {} on others.

    Hooks, extra state, buffers that are not persistent and versions of modules are as in torch.nn.Module.state_dict.
    Buffers have the digits with which they were loaded, also where the module computes with fewer. Collective.
    """
    arguments = {"prefix": prefix, "keep_vars": keep_vars}
    if destination is not None:
        arguments["destination"] = destination
    if holds_whole():  # a unit inside of the one whose dict is made
        return cast("dict[str, Any]", _plain_method(module, "state_dict")(**arguments))
    unit = unit_of(module, "state_dict")
    whole = whole_parameters(unit, keep)
    if not keep:
        return {}
    names = {id(tensor): (tensor, name) for tensor, name in _C.parameter_places(unit)}
    stored = {id(tensor): (tensor, values) for tensor, values, _ in _C.buffer_places(unit)}
    made: dict[str, nn.Parameter] = {}
    places = []
    for each in module.modules():
        for key, own in each._parameters.items():
            if own is None or id(own) not in names:
                continue
            name = names[id(own)][1]
            if name not in made:
                made[name] = _parameter(whole.pop(name), own.requires_grad)
            places.append(_Place(cast(Any, each._parameters), key, own, made[name], name))
        for key, buffer in each._buffers.items():
            if buffer is None:
                continue
            values = stored[id(buffer)][1] if id(buffer) in stored else buffer
            places.append(_Place(each._buffers, key, buffer, values.detach().clone(), None))
    with _standing_in(places):
        return cast("dict[str, Any]", _plain_method(module, "state_dict")(**arguments))


def _loads_by_itself(module: nn.Module) -> bool:
    """Whether its class may read the parameters that it loads into, as those of torch.nn do not."""
    classes = [cls for cls in type(module).__mro__ if "_load_from_state_dict" in cls.__dict__ and cls is not FSDPModule]
    return not classes[0].__module__.startswith("torch.nn.modules.")


def load_whole(
    module: nn.Module,
    state_dict: Mapping[str, Any],
    strict: bool = True,
    assign: bool = False,
    *,
    may_miss: Iterable[str] = (),
) -> _IncompatibleKeys:
    """Loads whole tensors under the names of the plain module: each rank copies its part.

    Pre- and post-hooks of loading, set_extra_state and _load_from_state_dict of the modules are called as
    torch.nn.Module.load_state_dict calls them, the post-hooks before shards are written. Nothing is written unless
    every rank can load everything. `assign` changes nothing: shards keep their dtype and memory. `may_miss`: keys that
    may be missing though `strict`. Collective. Errors, on all ranks: "contract", with PyTorch's words for missing and
    unexpected keys and for shapes; also for values that a storage dtype cannot hold exactly, which PyTorch rounds.
    """
    del assign
    unit = unit_of(module, "load_state_dict")
    objection, raised, result = "", None, _IncompatibleKeys([], [])
    places: list[_Place] = []
    taken: list[tuple[_Place, Tensor]] = []
    whole = whole_parameters(unit) if any(map(_loads_by_itself, module.modules())) else None
    try:
        places = _receivers(module, unit, whole)
        result, taken = _load_into(module, state_dict, strict, frozenset(may_miss), places)
    except BaseException as error:
        raised, objection = error, str(error) or type(error).__name__
    try:
        values = _by_name(taken, whole is not None)
    except RuntimeError as error:
        values, objection = [], str(error)
    try:
        _C.refuse_on_all(unit, "load_state_dict", objection)
    except _C.Error:
        if raised is not None and not isinstance(raised, RuntimeError):
            raise raised from None
        raise
    _C.load_state_dict(unit, values)
    with torch.no_grad():
        for place, loaded in taken:
            if place.canonical is None:
                place.own.copy_(loaded)
    return result


def _receivers(module: nn.Module, unit: _C.Unit, whole: dict[str, Tensor] | None) -> list[_Place]:
    """Stand-ins with the whole shapes for everything that a state dict holds."""
    parts = {part.name: part for part in _C.parameter_parts(unit)}
    names = {id(tensor): (tensor, name) for tensor, name in _C.parameter_places(unit)}
    # A module that computes with fewer digits than a buffer was loaded with shows those alone.
    buffers = {id(tensor): (tensor, stored, name) for tensor, stored, name in _C.buffer_places(unit)}

    def stand_in(values: Tensor | None, like: Tensor | None, shape: Any, dtype: torch.dtype) -> Tensor:
        if whole is None:
            return torch.empty(shape, dtype=dtype, device="meta")
        return values if values is not None else cast(Tensor, like).detach().clone()

    places = []
    for each in module.modules():
        for key, own in each._parameters.items():
            if own is None:
                continue
            name = names[id(own)][1] if id(own) in names else None
            part = None if name is None else parts[name]
            shape, dtype = (own.shape, own.dtype) if part is None else (part.shape, part.storage)
            values = None if whole is None or name is None else whole[name]
            receiver = _parameter(stand_in(values, own, shape, dtype), False)
            places.append(_Place(cast(Any, each._parameters), key, own, receiver, name))
        for key, buffer in each._buffers.items():
            if buffer is None or key in each._non_persistent_buffers_set:
                continue
            _, stored, known = buffers.get(id(buffer), (buffer, buffer, None))
            receiver_of_buffer = stand_in(None, stored, buffer.shape, stored.dtype)
            places.append(_Place(each._buffers, key, buffer, receiver_of_buffer, known))
    return places


def _load_into(
    module: nn.Module, state_dict: Mapping[str, Any], strict: bool, may_miss: frozenset[str], places: list[_Place]
) -> tuple[_IncompatibleKeys, list[tuple[_Place, Tensor]]]:
    """The module's own load_state_dict, which puts the dict's tensors into the places of the stand-ins."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"Expected state_dict to be dict-like, got {type(state_dict)}.")
    # load_state_dict changes tensors' requires_grad and notes in the metadata how it was called.
    entries = OrderedDict((key, x.detach() if isinstance(x, Tensor) else x) for key, x in state_dict.items())
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        copied = OrderedDict((key, dict(value)) for key, value in metadata.items())
        entries._metadata = copied  # type: ignore[attr-defined]
    with _standing_in(places):
        result = _plain_method(module, "load_state_dict")(entries, strict=strict and not may_miss, assign=True)
        taken = [(place, cast(Tensor, place.entries[place.key])) for place in places]
    if strict and may_miss:
        missing = [key for key in result.missing_keys if key not in may_miss]
        words = [
            f"{kind} key(s) in state_dict: " + ", ".join(f'"{key}"' for key in keys) + ". "
            for kind, keys in (("Missing", missing), ("Unexpected", result.unexpected_keys))
            if keys
        ]
        if words:
            name = type(module).__name__
            raise RuntimeError(f"Error(s) in loading state_dict for {name}:\n\t" + "\n\t".join(words))
    return result, [(place, now) for place, now in taken if now is not place.stand_in or not now.is_meta]


def _by_name(taken: list[tuple[_Place, Tensor]], may_be_unchanged: bool) -> list[tuple[str, Tensor]]:
    """What the library loads. A tied parameter has one value under all its names."""
    values: dict[str, tuple[_Place, Tensor]] = {}
    for place, loaded in taken:
        if place.canonical is None:
            continue
        first = values.setdefault(place.canonical, (place, loaded))
        if first[1] is loaded or _same_bits(first[1], loaded):
            continue
        if may_be_unchanged and loaded is place.stand_in:
            continue
        if may_be_unchanged and first[1] is first[0].stand_in:
            values[place.canonical] = (place, loaded)
            continue
        raise RuntimeError(
            f"load_state_dict: found two different values for {place.canonical}, which the model has in several places "
            "as one tied parameter, expected the same under each of its names"
        )
    return [(name, loaded.detach()) for name, (_, loaded) in values.items()]


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether both are the same values, NaN among them."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(bits[0], bits[1])


def get_model_state_dict(model: nn.Module, *, options: Any = None) -> dict[str, Any]:
    """Returns the state dict of the plain module: whole tensors, names as there.

    On every rank, or, with `cpu_offload`, on rank 0 alone, on the CPU. Collective. Counterpart:
    torch.distributed.checkpoint.state_dict.get_model_state_dict with full_state_dict=True.
    """
    asked = checked(options, "get_model_state_dict")
    unit = unit_of(model, "get_model_state_dict")
    state = whole_state_dict(model, keep=not asked.cpu_offload or _C.rank_of(unit) == 0)
    if asked.ignore_frozen_params:
        for name in _frozen_names(model):
            state.pop(name, None)
    return on_cpu(state) if asked.cpu_offload else state


def set_model_state_dict(model: nn.Module, model_state_dict: Mapping[str, Any], *, options: Any = None) -> Any:
    """Loads a whole state dict, of a plain module or of get_model_state_dict() in any layout.

    Returns missing and unexpected keys, as load_state_dict() does. Collective: every rank brings the dict, or, with
    `broadcast_from_rank0`, rank 0 does, and every rank then has all of it in memory for the time of the call.
    Counterpart: torch.distributed.checkpoint.state_dict.set_model_state_dict. Errors: as model.load_state_dict.
    """
    asked = checked(options, "set_model_state_dict")
    unit = unit_of(model, "set_model_state_dict")
    if asked.broadcast_from_rank0:
        model_state_dict = from_rank0(unit, model_state_dict, device_of(unit))
    may_miss = _frozen_names(model) if asked.ignore_frozen_params else []
    return load_whole(model, model_state_dict, asked.strict, may_miss=may_miss)


def _frozen_names(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad]
