"""State dicts of whole tensors, in PyTorch's layouts, and checkpoints in the format of the program `tessera`.

A dict that is taken from a sharded module is that of the plain module: plain modules and optimizers load it, and other
shardings do, on any number of ranks. There is no DTensor. Next: docs/checkpoint.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import pickle
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX, _IncompatibleKeys

from tessera import _C
from tessera._module import FSDPModule, unit_of
from tessera._optim import GradScaler, ShardedOptimizer
from tessera._parameter import ShardedParameter
from tessera._policy import contract_of
from tessera._world import usage_error, world

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]

_inside = threading.local()


def holds_whole() -> bool:
    """Whether this thread is in a state_dict() or load_state_dict() of a sharded module, whose tensors are whole."""
    return getattr(_inside, "depth", 0) > 0


# --- Whole tensors in the places of a module ------------------------------------------------------------------------


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


def _whole_parameters(unit: _C.Unit, keep: bool = True) -> dict[str, Tensor]:
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
    whole = _whole_parameters(unit, keep)
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
    whole = _whole_parameters(unit) if any(map(_loads_by_itself, module.modules())) else None
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
    """What the library loads. A tied parameter has one value, whatever its names."""
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


# --- Options --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class StateDictOptions:
    """Options of the functions below, with the fields of torch.distributed.checkpoint.state_dict.StateDictOptions.

    That class is accepted, too. `full_state_dict` is True, as it has to be: dicts hold whole tensors (PyTorch's default
    False asks for DTensors). `cpu_offload`: tensors on the CPU, on rank 0 alone, {} on the others, as in PyTorch.
    `ignore_frozen_params`: parameters that are frozen are left out, and may be missing. `strict`: every name, and no
    other. `broadcast_from_rank0`: rank 0's dict is loaded on every rank; others may give {}. Refused with another value
    than this one: `keep_submodule_prefixes` True, `flatten_optimizer_state_dict` False.
    """

    full_state_dict: bool = True
    cpu_offload: bool = False
    ignore_frozen_params: bool = False
    keep_submodule_prefixes: bool = True
    strict: bool = True
    broadcast_from_rank0: bool = False
    flatten_optimizer_state_dict: bool = False


def _checked(options: Any, what: str) -> StateDictOptions:
    if options is None:
        return StateDictOptions()
    fields = [field.name for field in dataclasses.fields(StateDictOptions)]
    if not all(hasattr(options, name) for name in fields):
        raise TypeError(f"{what}: found options {options!r}, expected a tessera.StateDictOptions")
    ours = StateDictOptions(**{name: getattr(options, name) for name in fields})
    for name, expected, advice in (
        ("full_state_dict", True, "dicts hold whole tensors; for a rank's own part use tessera.save_checkpoint"),
        ("keep_submodule_prefixes", True, "give the submodule itself"),
        ("flatten_optimizer_state_dict", False, 'the state is {"state": {name: {...}}, "param_groups": [...]}'),
    ):
        if getattr(ours, name) is not expected:
            raise usage_error(f"{what}: found {name}={getattr(ours, name)}, expected {expected}; {advice}")
    return ours


class _WithoutTensors(pickle.Pickler):
    """Keeps tensors aside: a text says of each its place, shape and dtype."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        self.tensors.append(value.detach())
        return len(self.tensors) - 1, tuple(value.shape), value.dtype


class _WithTensors(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file)
        self._device = device
        self.tensors: dict[int, Tensor] = {}

    def persistent_load(self, described: Any) -> Tensor:
        place, shape, dtype = described
        return self.tensors.setdefault(place, torch.empty(shape, dtype=dtype, device=self._device))


def _from_rank0(unit: _C.Unit, mine: Any, device: torch.device) -> Any:
    """Rank 0's dict on every rank, tensors on `device`. Collective."""
    is_first = _C.rank_of(unit) == 0
    file = io.BytesIO()
    pickler = _WithoutTensors(file)
    problem = ""
    if is_first:
        try:
            pickler.dump(mine)
        except Exception as error:
            problem = f"broadcast_from_rank0: found a value that pickle refuses ({error}), expected plain ones"
    _C.refuse_on_all(unit, "broadcast_from_rank0", problem)
    text = _C.first_rank_bytes(unit, file.getvalue())
    if is_first:
        tensors = pickler.tensors
        received = mine
    else:
        unpickler = _WithTensors(io.BytesIO(text), device)
        received = unpickler.load()
        tensors = [unpickler.tensors[place] for place in range(len(unpickler.tensors))]
    for tensor in tensors:
        if tensor.numel() > 0:
            sent = tensor.to(device).contiguous() if is_first else tensor
            _C.broadcast(unit, sent.reshape(-1).view(torch.uint8))
    return received


def _device_of(unit: _C.Unit) -> torch.device:
    parts = _C.parameter_parts(unit)
    return parts[0].shard.device if parts else torch.device("cpu")


# --- Models ---------------------------------------------------------------------------------------------------------


def get_model_state_dict(model: nn.Module, *, options: Any = None) -> dict[str, Any]:
    """Returns the state dict of the plain module: whole tensors, names as there.

    On every rank, or, with `cpu_offload`, on rank 0 alone, on the CPU. Collective. Counterpart:
    torch.distributed.checkpoint.state_dict.get_model_state_dict with full_state_dict=True.
    """
    asked = _checked(options, "get_model_state_dict")
    unit = unit_of(model, "get_model_state_dict")
    state = whole_state_dict(model, keep=not asked.cpu_offload or _C.rank_of(unit) == 0)
    if asked.ignore_frozen_params:
        for name in _frozen_names(model):
            state.pop(name, None)
    return _on_cpu(state) if asked.cpu_offload else state


def set_model_state_dict(model: nn.Module, model_state_dict: Mapping[str, Any], *, options: Any = None) -> Any:
    """Loads a whole state dict, of a plain module or of get_model_state_dict() in any layout.

    Returns missing and unexpected keys, as load_state_dict() does. Collective: every rank brings the dict, or, with
    `broadcast_from_rank0`, rank 0 does, and every rank then has all of it in memory for the time of the call.
    Counterpart: torch.distributed.checkpoint.state_dict.set_model_state_dict. Errors: as model.load_state_dict.
    """
    asked = _checked(options, "set_model_state_dict")
    unit = unit_of(model, "set_model_state_dict")
    if asked.broadcast_from_rank0:
        model_state_dict = _from_rank0(unit, model_state_dict, _device_of(unit))
    may_miss = _frozen_names(model) if asked.ignore_frozen_params else []
    return load_whole(model, model_state_dict, asked.strict, may_miss=may_miss)


def _frozen_names(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad]


def _on_cpu(state: Any) -> Any:
    """Copies on the CPU; the dict keeps its class and metadata."""
    if isinstance(state, Tensor):
        return state.cpu()
    if isinstance(state, dict):
        for key, value in state.items():
            state[key] = _on_cpu(value)
    return state


# --- Optimizers -----------------------------------------------------------------------------------------------------


class _Parameters:
    """The parameters of a sharded module by their names in the plain one."""

    def __init__(self, model: nn.Module, unit: _C.Unit) -> None:
        by_shard = {id(part.shard): part for part in _C.parameter_parts(unit)}
        self.part: dict[str, _C.Part] = {}  # by every name
        self.name_of: dict[int, str] = {}  # by shard, or by an ignored parameter; the first name
        self.first: dict[str, str] = {}  # by the library's name
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.name_of.setdefault(id(parameter), name)
            part = by_shard.get(id(parameter))
            if part is not None:
                self.part[name] = part
                self.first.setdefault(part.name, name)


def _named_state(model: nn.Module, optimizer: torch.optim.Optimizer, first_alone: bool, what: str) -> dict[str, Any]:
    """{"state": {name: {...}}, "param_groups": [{"params": [names], ...}]}, whole tensors. Collective."""
    unit = unit_of(model, what)
    known = _Parameters(model, unit)
    state: dict[str, dict[str, Any]] = {}
    like_shards: dict[str, dict[str, Tensor]] = {}
    groups: list[dict[str, Any]] = []
    raised: BaseException | None = None
    try:
        for group in optimizer.param_groups:
            values = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            groups.append({**values, "params": [_name_in(known, p, optimizer, what) for p in group["params"]]})
        if not isinstance(optimizer, ShardedOptimizer):
            state, like_shards = _local_state(known, optimizer, what)
    except BaseException as error:
        raised = error
    _refuse_raised(unit, what, raised, "usage")
    if isinstance(optimizer, ShardedOptimizer):
        for canonical, steps, kept in _C.optimizer_state_dict(unit, optimizer._bound, first_alone):
            if steps > 0:
                step = torch.tensor(float(steps), dtype=torch.float32)
                state[known.first[canonical]] = {"step": step, **kept}
    else:
        keep = not first_alone or _C.rank_of(unit) == 0
        _refuse_other_keys(unit, like_shards, what)
        for key in sorted(like_shards):
            for canonical, whole in _C.gather_like_shards(unit, like_shards[key], keep).items():
                state[known.first[canonical]][key] = whole
        state = state if keep else {}
    state = {name: state[name] for name in known.name_of.values() if name in state}
    return {"state": state, "param_groups": groups}


def _refuse_raised(unit: _C.Unit, what: str, raised: BaseException | None, kind: str = "contract") -> None:
    """Raises tessera.Error of the given kind on all ranks where one of them has caught an exception. Collective.

    What is no Exception, as KeyboardInterrupt, is raised again on its own rank.
    """
    words = ""
    if raised is not None:
        words = str(raised)
        if not words or not isinstance(raised, (RuntimeError, TypeError, ValueError)):
            words = f"{what}: {type(raised).__name__}: {words}"
    try:
        _C.refuse_on_all(unit, what, words)
    except _C.Error as error:
        if raised is not None and not isinstance(raised, Exception):
            raise raised from None
        if error.kind == "contract":
            error.kind = kind
        raise error from raised


def _refuse_other_keys(unit: _C.Unit, like_shards: dict[str, dict[str, Tensor]], what: str) -> None:
    """Raises tessera.Error on all ranks where one has other state to gather than rank 0. Collective."""
    mine = sorted(f"{key} of {name} in {x.dtype}" for key, of_all in like_shards.items() for name, x in of_all.items())
    first = _C.first_rank_bytes(unit, "\n".join(mine).encode()).decode().splitlines()
    objection = ""
    if mine != first:
        found = [line for line in mine if line not in first]
        expected = [line for line in first if line not in mine]
        objection = (
            f"{what}: found {', '.join(found[:3]) or 'nothing more'} on rank {_C.rank_of(unit)}, expected "
            f"{', '.join(expected[:3]) or 'nothing more'}, as on rank 0; make the same updates on every rank"
        )
    _C.refuse_on_all(unit, what, objection)


def _name_in(known: _Parameters, parameter: Tensor, optimizer: torch.optim.Optimizer, what: str) -> str:
    name = known.name_of.get(id(parameter))
    if name is None:
        raise usage_error(
            f"{what}: found in {type(optimizer).__name__} a parameter of the shape {tuple(parameter.shape)} that the "
            "model does not have, expected parameters of the model; make the optimizer after fully_shard (and after "
            "set_trainable), from model.parameters()"
        )
    return name


def _local_state(
    known: _Parameters, optimizer: torch.optim.Optimizer, what: str
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Tensor]]]:
    """The state of an optimizer of torch.optim by name, and by key what is laid out as the shard: to be gathered."""
    state: dict[str, dict[str, Any]] = {}
    like_shards: dict[str, dict[str, Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = _name_in(known, parameter, optimizer, what)
            if parameter not in optimizer.state:
                continue
            part = known.part.get(name)
            of_one = state.setdefault(name, {})
            for key, value in optimizer.state[parameter].items():
                of_one[key] = value
                if not isinstance(value, Tensor):
                    continue
                if part is None:
                    of_one[key] = value.detach().clone()
                elif value.dim() == 1 and value.shape == part.shard.shape:
                    like_shards.setdefault(key, {})[part.name] = value.detach()
                elif value.dim() == 0:
                    of_one[key] = value.detach().clone()
                else:
                    raise usage_error(
                        f"{what}: found {key} of {name} in {type(optimizer).__name__} with the shape "
                        f"{tuple(value.shape)}, expected that of the shard, {tuple(part.shard.shape)}, or a number"
                    )
    return state, like_shards


def optimizer_state_by_index(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The whole state in the layout of torch.optim.Optimizer.state_dict(). Collective."""
    named = _named_state(model, optimizer, False, f"{type(optimizer).__name__}.state_dict")
    numbers: dict[str, int] = {}
    for group in named["param_groups"]:
        group["params"] = [numbers.setdefault(name, len(numbers)) for name in group["params"]]
    return {
        "state": {numbers[name]: value for name, value in named["state"].items()},
        "param_groups": named["param_groups"],
    }


def get_optimizer_state_dict(model: nn.Module, optimizers: Optimizers, *, options: Any = None) -> dict[str, Any]:
    """Returns {"state": {name: {...}}, "param_groups": [...]} of whole tensors, as PyTorch does for a plain model.

    `optimizers`: one, or several; of tessera, or elementwise ones of torch.optim over model.parameters(). Parameters
    without an update so far have no state. 16-bit parameters that an optimizer of tessera steps also have
    "master_remainder" or "master". On every rank, or, with `cpu_offload`, on rank 0 alone, {} elsewhere. Collective.
    Counterpart: torch.distributed.checkpoint.state_dict.get_optimizer_state_dict with full_state_dict=True. Errors:
    "usage" for an optimizer of another model; "contract" where ranks have made different updates.
    """
    what = "get_optimizer_state_dict"
    asked = _checked(options, what)
    result: dict[str, Any] = {"state": {}, "param_groups": []}
    for optimizer in _several(optimizers):
        named = _named_state(model, optimizer, asked.cpu_offload, what)
        result["state"].update(named["state"])
        result["param_groups"].extend(named["param_groups"])
    if not asked.cpu_offload:
        return result
    return cast("dict[str, Any]", _on_cpu(result)) if _C.rank_of(unit_of(model, what)) == 0 else {}


def set_optimizer_state_dict(
    model: nn.Module, optimizers: Optimizers, optim_state_dict: Mapping[str, Any], *, options: Any = None
) -> None:
    """Loads a whole state: of get_optimizer_state_dict(), here in any layout or in PyTorch for the plain model.

    Load the model first. Optimizers of torch.optim and of tessera take each other's state: AdamW that of AdamW, SGD
    that of SGD, and 16-bit parameters begin without the bits that shards lack where the dict has none. Learning rates
    are the loaded ones. Collective: every rank brings the dict, or, with `broadcast_from_rank0`, rank 0 does.
    Counterpart: torch.distributed.checkpoint.state_dict.set_optimizer_state_dict. Errors, on all ranks: "contract",
    naming what is missing, unexpected (strict) or does not fit, values of groups that the optimizer was not made with
    included.
    """
    what = "set_optimizer_state_dict"
    asked = _checked(options, what)
    unit = unit_of(model, what)
    if asked.broadcast_from_rank0:
        optim_state_dict = _from_rank0(unit, optim_state_dict, _device_of(unit))
    several = _several(optimizers)
    for optimizer in several:
        load_optimizer_state(model, optimizer, optim_state_dict, asked.strict, shared=len(several) > 1)


def _several(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    return [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)


def load_optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state_dict: Mapping[str, Any],
    strict: bool,
    *,
    shared: bool = False,
) -> None:
    """Loads a state by names or by numbers. `shared`: the dict also has parameters of other optimizers. Collective."""
    what = "set_optimizer_state_dict"
    unit = unit_of(model, what)
    known = _Parameters(model, unit)
    raised: BaseException | None = None
    taken: dict[str, Any] = {}
    entries: list[tuple[str, int, dict[str, Tensor]]] = []
    values: dict[str, Any] = {}
    kept_dtypes: dict[str, dict[str, torch.dtype]] = {}
    try:
        loaded = _LoadedState(known, optimizer, state_dict, strict, shared)
        if isinstance(optimizer, ShardedOptimizer):
            kept_dtypes = optimizer._bound.kept_dtypes(unit)
            entries = loaded.entries(kept_dtypes)
            values = {k: v for k, v in loaded.group_values(0).items() if k not in optimizer._fixed}
        else:
            taken = loaded.by_number()
    except BaseException as error:
        raised = error
    _refuse_raised(unit, what, raised)
    if isinstance(optimizer, ShardedOptimizer):
        _fill_masters(unit, entries, kept_dtypes)
        _C.load_optimizer_state_dict(unit, optimizer._bound, entries, strict)
        optimizer.param_groups[0].update(values)
        return
    before = optimizer.state, optimizer.param_groups
    try:
        optimizer.load_state_dict(taken)
        if isinstance(optimizer, torch.optim.SGD):
            _keep_digits_of_momentum(unit, optimizer, taken)
    except BaseException as error:
        raised = error
    try:
        _refuse_raised(unit, what, raised)
    except BaseException:
        optimizer.state, optimizer.param_groups = before
        raise


def _fill_masters(
    unit: _C.Unit,
    entries: list[tuple[str, int, dict[str, Tensor]]],
    kept_dtypes: dict[str, dict[str, torch.dtype]],
) -> None:
    """Masters of float16 that a dict does not have are copies of the parameters. Collective."""
    # A rank whose dict has all of them gathers, too.
    if not any("master" in dtypes for dtypes in kept_dtypes.values()):
        return
    whole = _whole_parameters(unit)
    for name, steps, kept in entries:
        dtype = kept_dtypes[name].get("master")
        if dtype is not None and steps > 0 and "master" not in kept:
            kept["master"] = whole[name].to(dtype)


def _keep_digits_of_momentum(unit: _C.Unit, optimizer: torch.optim.SGD, taken: dict[str, Any]) -> None:
    """SGD's momentum has the dtype of gradients; torch.optim has rounded it to that of the shard, which has 16 bits."""
    final = {contract.name: contract.final for contract in contract_of(unit).parameters}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, of_one in taken["state"].items():
        momentum, parameter = of_one.get("momentum_buffer"), parameters[number]
        if isinstance(momentum, Tensor) and isinstance(parameter, ShardedParameter) and parameter._name in final:
            dtype = final[parameter._name]
            if dtype != parameter.dtype:
                optimizer.state[parameter]["momentum_buffer"] = momentum.to(parameter.device, dtype)


class _LoadedState:
    """A state dict as one optimizer takes it: by the names of its parameters. Raises RuntimeError where it does not
    fit.
    """

    def __init__(
        self,
        known: _Parameters,
        optimizer: torch.optim.Optimizer,
        state_dict: Mapping[str, Any],
        strict: bool,
        shared: bool,
    ) -> None:
        what = "set_optimizer_state_dict"
        if "state" not in state_dict or "param_groups" not in state_dict:
            raise RuntimeError(
                f'{what}: found a dict with {list(state_dict)[:3]}, expected "state" and "param_groups"; a flattened '
                "one is of flatten_optimizer_state_dict=True: save it without"
            )
        self._known = known
        self._optimizer = optimizer
        self._own = [[_name_in(known, p, optimizer, what) for p in group["params"]] for group in optimizer.param_groups]
        self._groups, self._state = self._renamed(state_dict, what)
        self._check_names(strict, shared, what)
        if isinstance(optimizer, ShardedOptimizer):
            self._check_values(optimizer, what)
        else:
            self._check_shapes(what)

    def _check_shapes(self, what: str) -> None:
        """What is no number has the shape of the parameter, so that a rank can take its part."""
        for name, part in self._known.part.items():
            for key, value in self._state.get(name, {}).items():
                if isinstance(value, Tensor) and value.dim() > 0 and value.shape != part.shape:
                    raise RuntimeError(
                        f"{what}: found {key} of {name} with the shape {tuple(value.shape)}, expected that of the "
                        f"whole parameter, {part.shape}"
                    )

    def _renamed(self, state_dict: Mapping[str, Any], what: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Groups and state by first names."""
        groups = [dict(group) for group in state_dict["param_groups"]]
        listed = [key for group in groups for key in group["params"]]
        if all(isinstance(key, str) for key in listed):
            first = {name: self._known.first.get(part.name, name) for name, part in self._known.part.items()}
        else:
            own = [name for names in self._own for name in names]
            trained = [name for name in own if name not in self._known.part or self._known.part[name].trainable]
            if len(listed) not in (len(own), len(trained)):
                raise RuntimeError(
                    f"{what}: found {len(listed)} parameters by number, expected {len(own)} as "
                    f"{type(self._optimizer).__name__}"
                    " has; a dict of get_optimizer_state_dict() goes by name"
                )
            first = dict(zip(listed, own if len(listed) == len(own) else trained, strict=True))
        for group in groups:
            group["params"] = [first.get(key, key) for key in group["params"]]
        return groups, {first.get(key, key): dict(value) for key, value in state_dict["state"].items()}

    def _check_names(self, strict: bool, shared: bool, what: str) -> None:
        own = {name for names in self._own for name in names}
        listed = {name for group in self._groups for name in group["params"]} | set(self._state)
        trained = {name for name in own if name not in self._known.part or self._known.part[name].trainable}
        missing = sorted(trained - listed)
        unexpected = [] if shared else sorted(map(str, listed - own))
        if strict and (missing or unexpected):
            words = [f"{kind} {', '.join(n)}" for kind, n in (("missing", missing), ("unexpected", unexpected)) if n]
            raise RuntimeError(
                f"{what}: found {' and '.join(words)}, expected every parameter of {type(self._optimizer).__name__} "
                "and no other; StateDictOptions(strict=False) leaves them"
            )

    def group_values(self, place: int) -> dict[str, Any]:
        """What the dict says of the optimizer's group at `place`, beside parameters."""
        own = set(self._own[place])
        values: dict[str, Any] = {}
        for group in self._groups:
            if own & set(group["params"]) or not own:
                values.update(group)
        return {key: value for key, value in values.items() if key not in ("params", "param_names")}

    def _check_values(self, optimizer: ShardedOptimizer, what: str) -> None:
        """An optimizer of tessera has one learning rate, and cannot change the rest."""
        from tessera._optim import _plain

        own = set(self._own[0])
        groups = [group for group in self._groups if own & set(group["params"])]
        rates = {float(group["lr"]) for group in groups if "lr" in group}
        if len(rates) > 1:
            raise RuntimeError(
                f"{what}: found groups with the learning rates {sorted(rates)}, expected one; make "
                f"{type(optimizer).__name__} "
                "with rules=[OptimizerRule(..., lr_scale=...)] and give every group one lr"
            )
        for group in groups:
            for key, made_with in optimizer._fixed.items():
                if key not in group or key in ("foreach", "fused", "capturable", "decoupled_weight_decay"):
                    continue
                if key == "weight_decay" and len(groups) > 1 and group[key] == 0:
                    continue  # a group without decay, which no_decay names here
                if _plain(group[key]) != _plain(made_with):
                    raise RuntimeError(
                        f"{what}: found {key} {group[key]!r} in the dict, expected {made_with!r}, with which "
                        f"{type(optimizer).__name__} was made; make it with the value of the dict"
                    )

    def entries(self, expected: dict[str, dict[str, torch.dtype]]) -> list[tuple[str, int, dict[str, Tensor]]]:
        """(the library's name, updates, whole tensors in its dtypes) of what the optimizer steps.

        `expected`: the dtypes by the library's names. Masters of float16 that the dict does not have are left out.
        """
        own = set(self._own[0])
        listed = dict.fromkeys(name for group in self._groups for name in group["params"] if name in own)
        result = []
        for name in listed:
            part = self._known.part[name]
            dtypes = expected.get(part.name)
            if dtypes is None:
                continue  # frozen
            of_one = self._state.get(name, {})
            kept = {key: x for key, x in of_one.items() if isinstance(x, Tensor) and key != "step"}
            steps = int(of_one["step"]) if "step" in of_one else int(bool(kept))
            for key, dtype in dtypes.items():
                if key in kept and kept[key].dtype != dtype and torch.promote_types(kept[key].dtype, dtype) == dtype:
                    kept[key] = kept[key].to(dtype)
                elif key == "master_remainder" and steps > 0 and key not in kept:
                    kept[key] = torch.zeros(part.shape, dtype=dtype)
            result.append((part.name, steps, kept))
        return result

    def by_number(self) -> dict[str, Any]:
        """For load_state_dict of torch.optim: this rank's parts of what is whole."""
        state: dict[int, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        number = 0
        for place, names in enumerate(self._own):
            values = {k: v for k, v in self._optimizer.param_groups[place].items() if k != "params"}
            groups.append({**values, **self.group_values(place), "params": list(range(number, number + len(names)))})
            for name in names:
                if name in self._state:
                    part = self._known.part.get(name)
                    state[number] = {key: _part_of(part, key, value) for key, value in self._state[name].items()}
                number += 1
        return {"state": state, "param_groups": groups}


# What optimizers of torch.optim keep of a parameter as one number. For parameters that are numbers themselves its shape
# does not tell it from a value for each element.
_NUMBERS = ("step", "mu_product", "eta", "mu")


def _is_whole(part: _C.Part | None, key: str, value: Any) -> bool:
    """Whether a rank takes its part of the value: it has the shape of the whole parameter."""
    return part is not None and key not in _NUMBERS and isinstance(value, Tensor) and value.shape == part.shape


def _part_of(part: _C.Part | None, key: str, value: Any) -> Any:
    if part is None or not _is_whole(part, key, value):
        return value.detach().clone() if isinstance(value, Tensor) else value
    return value.detach().reshape(-1)[part.begin : part.end].clone()


# --- Checkpoints ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LoadedCheckpoint:
    """What was saved beside tensors."""

    path: str  # of step-N
    step: int  # the steps that were done
    world_size: int  # ranks that wrote it
    user: dict[str, int | str]


def save_checkpoint(
    model: nn.Module,
    optimizer: ShardedOptimizer,
    folder: Any,
    step: int,
    *,
    user: Mapping[str, int | str] | None = None,
    scaler: GradScaler | None = None,
    keep_latest_k: int = 0,
    config_json: str = "{}",
) -> None:
    """Writes FOLDER/step-N, then FOLDER/latest, in the format of the program `tessera`, and waits for the disk.

    Saved are parameters, persistent buffers, what the optimizer keeps, and its learning rate, as it is now and as a
    scheduler found it; not betas and the like. `user`: names with numbers or texts, given back by load_checkpoint().
    Each rank writes its part; any number of ranks with any layout loads it, in Python or C++. `step`: steps that are
    done, at least the updates made. `keep_latest_k`: older ones are removed, 0 keeps all. `config_json`: that of a
    model family makes `tessera generate` and `tessera convert` read it. Collective, between steps. Counterpart:
    torch.distributed.checkpoint.save.

    Errors, on all ranks: "usage" for an optimizer that is not of tessera, for parameters, extra state or buffers that
    the format does not hold, for ranks that ask for different things; "io".
    """
    unit = unit_of(model, "save_checkpoint")
    _refuse_what_is_not_saved(model, unit)
    _C.save_checkpoint(
        unit,
        _bound_optimizer(optimizer, "save_checkpoint"),
        str(folder),
        step,
        {**_rates_of(optimizer), **dict(user or {})},
        None if scaler is None else scaler._bound,
        keep_latest_k,
        config_json,
    )


def load_checkpoint(
    model: nn.Module, optimizer: ShardedOptimizer, folder: Any, *, scaler: GradScaler | None = None
) -> LoadedCheckpoint:
    """Fills shards, buffers and optimizer state from FOLDER/latest, or from FOLDER where that is a step-N.

    Each rank reads the elements that it has; every file is verified. The optimizer goes on at the learning rate that
    was saved; load the scheduler's own state_dict() for what else it knows. Collective, between steps. Counterpart:
    torch.distributed.checkpoint.load. Errors, on all ranks: "io" where there is none, "format" naming the file or
    tensor that is missing, unknown or altered, "config" for another optimizer or loss scale, "usage".
    """
    unit = unit_of(model, "load_checkpoint")
    _refuse_what_is_not_saved(model, unit)
    bound = _bound_optimizer(optimizer, "load_checkpoint")
    found = LoadedCheckpoint(*_C.load_checkpoint(unit, bound, str(folder), None if scaler is None else scaler._bound))
    for name in _RATES:
        rate = found.user.pop(_RATE_KEY + name, None)
        if rate is not None:
            optimizer.param_groups[0][name] = float.fromhex(str(rate))
    return found


# The learning rate, and what schedulers take as the first one: kept among the user's values of a checkpoint.
_RATES = ("lr", "initial_lr")
_RATE_KEY = "tessera.python."


def _rates_of(optimizer: ShardedOptimizer) -> dict[str, str]:
    group = optimizer.param_groups[0]
    return {_RATE_KEY + name: float(group[name]).hex() for name in _RATES if name in group}


def has_checkpoint(folder: Any) -> bool:
    """Whether `folder` holds a checkpoint for load_checkpoint(), as rank 0 sees it. Collective.

    Errors, on all ranks: "io"; "format" for one that is not whole.
    """
    return _C.has_checkpoint(world()._world, str(folder))


def _bound_optimizer(optimizer: Any, what: str) -> _C.Optimizer:
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer._bound
    raise usage_error(
        f"{what}: found {type(optimizer).__module__}.{type(optimizer).__name__}, expected an optimizer of tessera "
        "(AdamW, SGD, Muon), whose state the format holds; for others save tessera.get_model_state_dict(model) and "
        "tessera.get_optimizer_state_dict(model, optimizer) by torch.save on rank 0"
    )


def _refuse_what_is_not_saved(model: nn.Module, unit: _C.Unit) -> None:
    """Whatever model.state_dict() has beside the library's tensors would be lost."""
    parameters = {id(tensor) for tensor, _ in _C.parameter_places(unit)}
    buffers = {id(tensor) for tensor, _, _ in _C.buffer_places(unit)}
    lost: list[str] = []
    for path, module in model.named_modules():
        prefix = path + "." if path else ""
        lost += [prefix + key for key, p in module._parameters.items() if p is not None and id(p) not in parameters]
        for key, buffer in module._buffers.items():
            if buffer is None or key in module._non_persistent_buffers_set or id(buffer) in buffers:
                continue
            lost.append(prefix + key)
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            lost.append(prefix + _EXTRA_STATE_KEY_SUFFIX)
    if lost:
        raise usage_error(
            f"checkpoint: found {', '.join(lost)}, which sharding does not know (ignored parameters, extra state, "
            "buffers that were replaced after fully_shard), expected none, since the format would lose them; save "
            "tessera.get_model_state_dict(model) and tessera.get_optimizer_state_dict(model, optimizer) by torch.save "
            "on rank 0"
        )


