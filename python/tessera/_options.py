"""What the state dict functions have in common: their options, and a dict of rank 0 on every rank."""

from __future__ import annotations

import dataclasses
import io
import pickle
from typing import Any

import torch
from torch import Tensor

from tessera import _C
from tessera._world import usage_error


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


def checked(options: Any, what: str) -> StateDictOptions:
    if options is None:
        return StateDictOptions()
    fields = [field.name for field in dataclasses.fields(StateDictOptions)]
    if not all(hasattr(options, name) for name in fields):
        raise TypeError(f"{what}: found options {options!r}, expected a tessera.StateDictOptions")
    ours = StateDictOptions(**{name: getattr(options, name) for name in fields})
    for name, expected, advice in (
        ("full_state_dict", True, "dicts hold whole tensors; for the part of one rank use tessera.save_checkpoint"),
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


def from_rank0(unit: _C.Unit, mine: Any, device: torch.device) -> Any:
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


def device_of(unit: _C.Unit) -> torch.device:
    parts = _C.parameter_parts(unit)
    return parts[0].shard.device if parts else torch.device("cpu")


def on_cpu(state: Any) -> Any:
    """Copies on the CPU; the dict keeps its class and metadata."""
    if isinstance(state, Tensor):
        return state.cpu()
    if isinstance(state, dict):
        for key, value in state.items():
            state[key] = on_cpu(value)
    return state
