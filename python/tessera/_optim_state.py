"""States of optimizers, of tessera and of torch.optim: whole tensors by name, in PyTorch's layouts.

Other shardings and plain optimizers load them, on any number of ranks. Next: _checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from tessera import _C
from tessera._optim import ShardedOptimizer, plain_value
from tessera._options import checked, device_of, from_rank0, on_cpu
from tessera._parameter import ShardedParameter
from tessera._policy import contract_of
from tessera._state import whole_parameters
from tessera._unit import unit_of
from tessera._world import usage_error

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


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
    asked = checked(options, what)
    result: dict[str, Any] = {"state": {}, "param_groups": []}
    for optimizer in _several(optimizers):
        named = _named_state(model, optimizer, asked.cpu_offload, what)
        result["state"].update(named["state"])
        result["param_groups"].extend(named["param_groups"])
    if not asked.cpu_offload:
        return result
    return cast("dict[str, Any]", on_cpu(result)) if _C.rank_of(unit_of(model, what)) == 0 else {}


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
    asked = checked(options, what)
    unit = unit_of(model, what)
    if asked.broadcast_from_rank0:
        optim_state_dict = from_rank0(unit, optim_state_dict, device_of(unit))
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
    whole = whole_parameters(unit)
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
        """What the dict says of the optimizer's group at `place`, without its parameters."""
        own = set(self._own[place])
        values: dict[str, Any] = {}
        for group in self._groups:
            if own & set(group["params"]) or not own:
                values.update(group)
        return {key: value for key, value in values.items() if key not in ("params", "param_names")}

    def _check_values(self, optimizer: ShardedOptimizer, what: str) -> None:
        """An optimizer of tessera has one learning rate, and cannot change the rest."""
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
                if plain_value(group[key]) != plain_value(made_with):
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
