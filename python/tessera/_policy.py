"""Dtype policies, and the contracts that become of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tessera import _C


@dataclasses.dataclass(frozen=True)
class Rule:
    """What differs for the parameters (and buffers) that one of the patterns matches.

    `match`: a pattern or several. A pattern matches consecutive whole components of a name, anywhere in it: "*norm",
    "mlp.gate"; a trailing ".weight" or ".bias" may be left out. Each pattern has to match something. Of several
    rules that match a parameter the last one wins, field by field; None leaves a field as it is.

    Fields, all torch.dtype unless said otherwise: `param_dtype` (compute), `reduce_dtype` (wire), `storage_dtype` (the
    shard), `accumulate_dtype` (sums before and after the wire), `grad_dtype` (a raw gradient is rounded to it when it
    arrives); `pin` (bool: compute in float32 at least), `widen` (bool: a pin may widen the stored shard), `frozen`
    ("yes", "no", "shard", "replicate").
    """

    match: str | Sequence[str]
    _: dataclasses.KW_ONLY
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    storage_dtype: torch.dtype | None = None
    accumulate_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    pin: bool | None = None
    widen: bool | None = None
    frozen: str | None = None


@dataclasses.dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of a unit. The first four fields are those of FSDP2's MixedPrecisionPolicy.

    - `param_dtype`: compute dtype; None: each parameter computes in the dtype that it has.
    - `reduce_dtype`: dtype on the wire; None: float32, or wider where a parameter computes wider (FSDP2: the compute
      dtype).
    - `output_dtype`: floating results of the unit are cast to it, wherever the unit stands.
    - `cast_forward_inputs`: floating arguments of the unit are cast to `param_dtype`.
    - `storage_dtype`: dtype of the shards; None: as the tensors are.
    - `accumulate_dtype`: sums before and after the wire; None: float32, or wider.
    - `final_dtype`: `.grad` of the shards; None: that of the shard's master, float32 for 16 bits.
    - `param_rounding`: "nearest_even" or "half_away", of float32 shards that compute in bfloat16.
    - `intrinsic`: "minority", "all" or "none": which tensors keep the wider dtype that they are found in.
    - `on_narrower_request`: "keep", "narrow" or "error", where `storage_dtype` cannot hold the values.
    - `master`: "auto" or "none": whether 16-bit shards are stepped with the bits that they lack kept with them.
    - `no_decay`: patterns of parameters without weight decay; None: the optimizer's own.
    - `loss_scaling`: the loss is scaled by GradScaler; float16 is refused without it.
    - `rules`: what differs for some parameters, of this unit and of the model.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    _: dataclasses.KW_ONLY
    storage_dtype: torch.dtype | None = None
    accumulate_dtype: torch.dtype | None = None
    final_dtype: torch.dtype | None = None
    param_rounding: str = "nearest_even"
    intrinsic: str = "minority"
    on_narrower_request: str = "keep"
    master: str = "auto"
    no_decay: Sequence[str] | None = None
    loss_scaling: bool = False
    rules: Sequence[Rule] = ()


# The fields that FSDP2's policy has, too.
_OF_FSDP2 = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")


def _rule(rule: Rule) -> _C.PrecisionRule:
    fields = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}
    match = fields.pop("match")
    return _C.PrecisionRule([match] if isinstance(match, str) else list(match), **fields)


def policy_of(policy: Any) -> tuple[_C.PrecisionPolicy, torch.dtype | None]:
    """The library's policy and the output dtype of the unit. Takes FSDP2's MixedPrecisionPolicy, too.

    Raises TypeError for anything else.
    """
    if isinstance(policy, MixedPrecisionPolicy):
        ours = policy
    elif all(hasattr(policy, name) for name in _OF_FSDP2):
        ours = MixedPrecisionPolicy(**{name: getattr(policy, name) for name in _OF_FSDP2})
    else:
        raise TypeError(f"fully_shard: found mp_policy {policy!r}, expected a tessera.MixedPrecisionPolicy")
    fields = {field.name: getattr(ours, field.name) for field in dataclasses.fields(ours)}
    output_dtype = fields.pop("output_dtype")
    fields["rules"] = [_rule(rule) for rule in ours.rules]
    fields["no_decay"] = None if ours.no_decay is None else list(ours.no_decay)
    return _C.PrecisionPolicy(**fields), output_dtype


@dataclasses.dataclass(frozen=True)
class ParameterContract:
    """What a parameter's bytes and gradients are, agreed on by all ranks before the first step.

    `reasons` says for each field why its value is what it is ("[precision] param_dtype", "rule 2 (*norm)").
    """

    name: str
    shape: tuple[int, ...]  # of the whole parameter
    storage: torch.dtype  # the shard
    compute: torch.dtype  # the whole parameter in forward and backward
    grad: torch.dtype | None  # a raw gradient is rounded to it; None: added as it arrives
    accumulate: torch.dtype
    reduce: torch.dtype  # on the wire
    final: torch.dtype  # .grad of the shard
    trainable: bool
    replicated: bool  # frozen, and whole on every rank
    master: str  # "none", "storage", "remainder", "copy"
    state: torch.dtype  # what an optimizer of tessera keeps
    aliases: tuple[str, ...]  # further names of a tied parameter
    raw_sum_by_autograd: bool  # several uses of one tensor reach the contract as autograd's sum
    reasons: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class BufferContract:
    """A buffer, which every rank holds whole."""

    name: str
    shape: tuple[int, ...]
    storage: torch.dtype
    compute: torch.dtype
    stored: bool  # state dicts and checkpoints hold it (PyTorch: persistent)


@dataclasses.dataclass(frozen=True)
class UnitContract:
    """The dtypes at the border of a unit; None: tensors stay as they come."""

    name: str  # "" for the outermost
    nested: bool
    input: torch.dtype | None
    activation: torch.dtype | None
    output: torch.dtype | None


@dataclasses.dataclass(frozen=True)
class ModelContract:
    """The contracts of a module's parameters, buffers and units. `str()` gives the tables with their reasons."""

    parameters: tuple[ParameterContract, ...]
    buffers: tuple[BufferContract, ...]
    units: tuple[UnitContract, ...]
    _table: str = dataclasses.field(repr=False)

    def __str__(self) -> str:
        return self._table

    def __getitem__(self, name: str) -> ParameterContract:
        """The contract of the parameter with this name, or with this further name of a tied one. Raises KeyError."""
        for parameter in self.parameters:
            if name == parameter.name or name in parameter.aliases:
                return parameter
        raise KeyError(name)


def contract_of(unit: _C.Unit) -> ModelContract:
    table, parameters, buffers, units = unit.contract()
    return ModelContract(
        tuple(ParameterContract(**each) for each in parameters),
        tuple(BufferContract(**each) for each in buffers),
        tuple(UnitContract(**each) for each in units),
        table,
    )
