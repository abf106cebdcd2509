"""Checkpoints in the format of the program `tessera`, of a model and an optimizer. Next: docs/checkpoint.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from tessera import _C
from tessera._optim import GradScaler, ShardedOptimizer
from tessera._unit import unit_of
from tessera._world import usage_error, world


@dataclasses.dataclass(frozen=True)
class LoadedCheckpoint:
    """Values that were saved with the tensors."""

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
    scheduler found it; not betas and the like. `user`: names with numbers or texts, returned by load_checkpoint().
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

    Each rank reads the elements that it has; every file is verified. The optimizer continues at the learning rate that
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
    """Tensors of model.state_dict() that are not the library's would be lost."""
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
