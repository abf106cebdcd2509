"""Optimizers over sharded modules, gradient norms and clipping, and the loss scaler for float16.

Every elementwise optimizer of torch.optim works on `model.parameters()`, too. Those here choose weight decay by name,
since a shard has one dim, keep the bits that 16-bit shards lack, and refuse to step while a backward is not finished.
Next: _state.py.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tessera import _C
from tessera._unit import unit_of
from tessera._world import usage_error, world

# Optimizers of torch.optim whose update of an element reads the shape or the norm of its whole tensor, or of all.
_NOT_ELEMENTWISE: tuple[tuple[str, str], ...] = (
    ("Muon", "use tessera.Muon(model, ...)"),
    ("LBFGS", "use an elementwise optimizer, as tessera.AdamW(model, ...)"),
    ("Adafactor", "use an elementwise optimizer, as tessera.AdamW(model, ...)"),
)


@dataclasses.dataclass(frozen=True)
class OptimizerRule:
    """How the parameters that one of the patterns matches are stepped otherwise than the rest.

    `match`: a pattern or several, as `Rule.match`; each has to match a parameter. Of several rules that match a
    parameter the last one wins, field by field; None leaves a field as it is. `lr_scale` multiplies the learning rate,
    `weight_decay` replaces the optimizer's, also for what `no_decay` names. The counterpart in PyTorch is a parameter
    group.
    """

    match: str | Sequence[str]
    _: dataclasses.KW_ONLY
    lr_scale: float | None = None
    weight_decay: float | None = None


def _patterns(patterns: str | Sequence[str]) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _rules(rules: Iterable[OptimizerRule]) -> list[_C.OptimizerRule]:
    return [_C.OptimizerRule(_patterns(rule.match), rule.lr_scale, rule.weight_decay) for rule in rules]


def _shards_of(model: nn.Module) -> list[nn.Parameter]:
    """In the order of the plain module's parameters; ignored ones are not stepped here."""
    shards = {id(part.shard) for part in _C.parameter_parts(unit_of(model))}
    return [parameter for parameter in model.parameters() if id(parameter) in shards]


class ShardedOptimizer(torch.optim.Optimizer):
    """What AdamW, SGD and Muon have in common: a torch.optim.Optimizer whose update is the library's.

    It has one parameter group with all parameters of the model, which are shards: `param_groups[0]["lr"]` is the
    learning rate of the next step, so that PyTorch's schedulers work. All other values of the group are those that the
    optimizer was made with; `step()` refuses a group that has others. Parameters that are stepped otherwise are named
    by patterns (`no_decay`, `rules`), not by groups. `state` is empty: `state_dict()` has the moments.
    """

    _made: ClassVar[weakref.WeakSet[ShardedOptimizer]] = weakref.WeakSet()
    _count: ClassVar[int] = 0

    def __init__(self, model: nn.Module, core: _C.Optimizer, defaults: dict[str, Any]) -> None:
        """Takes the library's optimizer of `model` and the values of its parameter group."""
        self._model = weakref.ref(model)
        self._bound = core
        self._is_made = False
        shards = _shards_of(model)
        super().__init__(shards, defaults)
        self._is_made = True
        # PyTorch's get_optimizer_state_dict makes a step to fill a state that is empty.
        for shard in shards:
            self.state[shard] = {}
        self._fixed = {name: value for name, value in defaults.items() if name != "lr"}
        self._number = ShardedOptimizer._count
        ShardedOptimizer._count += 1
        ShardedOptimizer._made.add(self)

    @property
    def model(self) -> nn.Module:
        """The module that it was made for. Errors: "usage" where that is gone."""
        model = self._model()
        if model is None:
            raise usage_error(
                f"{type(self).__name__}: found that the module it was made for is gone, expected it to live as long; "
                "keep a reference to it"
            )
        return model

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates every parameter that has a gradient, and returns what `closure` returns, which is called first.

        Not collective, but for Muon's. Errors: "usage" while a recorded forward waits for its backward or micro-batches
        wait to be reduced, and for a parameter group with other values than it was made with.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_changed_groups()
        self._bound.lr = float(self.param_groups[0]["lr"])
        self._bound.step()
        return loss

    def _refuse_changed_groups(self) -> None:
        name = type(self).__name__
        group = self.param_groups[0]
        for key, made_with in self._fixed.items():
            if key in group and plain_value(group[key]) != plain_value(made_with):
                advice = "make it with that value"
                if key in ("betas", "momentum"):
                    advice += ", and a scheduler with cycle_momentum=False"
                raise usage_error(
                    f"{name}: found {key} {group[key]!r} in param_groups[0], expected {made_with!r}, with which it was "
                    f"made, since only lr may change; {advice}"
                )
        if len(self.param_groups) != 1 or len(group["params"]) != len(self.state):
            raise usage_error(
                f"{name}: found {len(self.param_groups)} parameter groups, the first with {len(group['params'])} "
                f"parameters, expected one with all {len(self.state)}; name parameters by no_decay= or rules="
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of the module, or sets them to zero. Errors: "usage" in a step."""
        model = self._model()
        if model is not None:
            unit_of(model).zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: patterns of `no_decay` and `rules` do what groups do. Errors: "usage"."""
        if getattr(self, "_is_made", False):
            raise usage_error(
                f"{type(self).__name__}.add_param_group: found a second group, expected one with all parameters of the "
                "module; name parameters by no_decay= or rules=, or give groups of model.named_parameters() to an "
                "elementwise optimizer of torch.optim"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Returns the whole state in PyTorch's layout: {"state": {index: {...}}, "param_groups": [...]}.

        Tensors are whole, copies, on every rank: torch.optim's optimizer of the same name on the plain model loads
        them. 16-bit parameters also have "master_remainder" or "master", the bits that their shards lack. Collective:
        every rank calls it. By name, or on rank 0 alone: `get_optimizer_state_dict`.
        """
        from tessera._optim_state import optimizer_state_by_index

        for before in getattr(self, "_optimizer_state_dict_pre_hooks", {}).values():
            before(self)
        state = optimizer_state_by_index(self.model, self)
        for after in getattr(self, "_optimizer_state_dict_post_hooks", {}).values():
            changed = after(self, state)
            state = state if changed is None else changed
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resumes from what `state_dict()` gave, here, in another layout, or of torch.optim on the plain model.

        Each rank takes its part of whole tensors. The learning rate is the loaded one; other values of the groups have
        to be those of this optimizer. Collective. Errors: "contract", naming what does not fit; nothing has changed.
        """
        from tessera._optim_state import load_optimizer_state

        state = dict(state_dict)
        for before in getattr(self, "_optimizer_load_state_dict_pre_hooks", {}).values():
            changed = before(self, state)
            state = state if changed is None else changed
        load_optimizer_state(self.model, self, state, strict=True)
        for after in getattr(self, "_optimizer_load_state_dict_post_hooks", {}).values():
            after(self)

    def __getstate__(self) -> NoReturn:
        """Refused: a rank holds a part of the state. Raises TypeError."""
        raise TypeError(
            f"cannot pickle or copy a tessera.{type(self).__name__}: it holds this rank's part of the state; save "
            "optimizer.state_dict() or tessera.get_optimizer_state_dict(model, optimizer), which are whole, or a "
            "checkpoint by tessera.save_checkpoint(model, optimizer, folder, step)"
        )

    def _take_shards(self, model: nn.Module) -> None:
        """The group has the shards as they lie now."""
        shards = _shards_of(model)
        self.param_groups[0]["params"] = shards
        self.state.clear()
        for shard in shards:
            self.state[shard] = {}


def plain_value(value: Any) -> Any:
    """Tuples and lists, tensors and numbers compare by what is in them."""
    if isinstance(value, Tensor):
        return value.tolist()
    return tuple(map(plain_value, value)) if isinstance(value, (tuple, list)) else value


def follow(model: nn.Module) -> list[_C.Optimizer]:
    """The library's optimizers of `model` and of the units inside, which follow a set_trainable() of it."""
    # One that the program has dropped may live in a cycle (a scheduler's): the ranks have to agree on who is there.
    gc.collect()
    return [optimizer._bound for optimizer in _optimizers_of(model)]


def followed(model: nn.Module) -> None:
    """After set_trainable(): the optimizers that have followed show the shards of the new layout."""
    for optimizer in _optimizers_of(model):
        optimizer._take_shards(optimizer.model)


def _optimizers_of(model: nn.Module) -> Iterator[ShardedOptimizer]:
    inside = {id(module) for module in model.modules()}
    # In the order in which they were made, which is the same on every rank.
    for optimizer in sorted(ShardedOptimizer._made, key=lambda one: one._number):
        if id(optimizer._model()) in inside:
            yield optimizer


def _refuse_options(name: str, **asked: bool) -> None:
    for option, is_asked in asked.items():
        if is_asked:
            raise usage_error(
                f"{name}: found {option}=True, expected False, which is all that it has; use torch.optim.{name}"
                f"(model.parameters(), {option}=True)"
            )


class AdamW(ShardedOptimizer):
    """AdamW over the shards of a module, with the formulas and the defaults of torch.optim.AdamW.

    `model`: a sharded module; all of its trainable parameters are stepped. `no_decay`: patterns of parameters without
    weight decay, as `Rule.match`; PyTorch's idiom `p.ndim >= 2` decays nothing here, since shards have one dim.
    `rules`: OptimizerRules. Updates are formed in float32, in float64 for float64; a 16-bit shard is stepped with the
    bits that it lacks (`MixedPrecisionPolicy.master`), so that small updates add up. `foreach` and `fused` are without
    effect: there is one implementation.

    State, bytes an element of the shard: 8 in float32, 10 in bfloat16, 12 in float16. The defaults of the C++ library
    and of the program differ: betas (0.9, 0.95), weight_decay 0.1.

    Errors: "usage" for numbers out of range and options that it does not have; "contract" for a pattern that matches no
    parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        no_decay: str | Sequence[str] = (),
        rules: Sequence[OptimizerRule] = (),
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        """Collective where the contracts of the ranks have to agree: every rank makes the same one."""
        _refuse_options(
            "AdamW", amsgrad=amsgrad, maximize=maximize, capturable=capturable, differentiable=differentiable
        )
        core = _C.make_adamw(
            unit_of(model), float(lr), tuple(map(float, betas)), eps, weight_decay, _patterns(no_decay), _rules(rules)
        )
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": False, "maximize": False,
            "foreach": foreach, "capturable": False, "differentiable": False, "fused": fused,
            "decoupled_weight_decay": True,
        }  # fmt: skip
        super().__init__(model, core, defaults)


class SGD(ShardedOptimizer):
    """SGD with momentum over the shards of a module, with the formulas and the defaults of torch.optim.SGD.

    `model`, `no_decay`, `rules`, masters: as AdamW. The momentum has the dtype in which the shard is stepped. The
    default of the C++ library differs: lr 1e-2. Errors: as AdamW; it has no dampening and no nesterov.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        no_decay: str | Sequence[str] = (),
        rules: Sequence[OptimizerRule] = (),
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        """As AdamW."""
        _refuse_options("SGD", nesterov=nesterov, maximize=maximize, differentiable=differentiable)
        if dampening != 0:
            raise usage_error(
                f"SGD: found dampening {dampening}, expected 0, which is all that it has; use "
                "torch.optim.SGD(model.parameters(), dampening=...)"
            )
        core = _C.make_sgd(unit_of(model), float(lr), momentum, weight_decay, _patterns(no_decay), _rules(rules))
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": 0, "weight_decay": weight_decay, "nesterov": False,
            "maximize": False, "foreach": foreach, "differentiable": False, "fused": fused,
        }  # fmt: skip
        super().__init__(model, core, defaults)


class Muon(ShardedOptimizer):
    """Muon: matrices are orthogonalized, whole, and AdamW steps the rest.

    Matrices, [rows, columns], are the trainable parameters of two dims, and each [rows, columns] of those with three,
    but for those that a pattern of `adamw` matches: embeddings, heads, routers. Each is formed whole on one rank, by
    one all-to-all a step there and one back: `step()` is collective. torch.optim.Muon takes matrices alone, and
    computes in bfloat16 (here: `ns_dtype=torch.bfloat16`; float32 else).

    `lr`, `weight_decay`, `momentum`, `nesterov`, `ns_coefficients`, `eps`, `ns_steps`, `adjust_lr_fn` ("original" or
    "match_rms_adamw"): as torch.optim.Muon, whose defaults they have. `adamw_betas`, `adamw_eps`, `adamw_lr_scale` (its
    learning rate is lr times this): of what AdamW steps. `no_decay`, `rules`, masters: as AdamW. Errors: as AdamW.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        adamw: str | Sequence[str] = (),
        adamw_lr_scale: float = 1.0,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        ns_dtype: torch.dtype = torch.float32,
        no_decay: str | Sequence[str] = (),
        rules: Sequence[OptimizerRule] = (),
    ) -> None:
        """As AdamW."""
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise usage_error(f'Muon: found adjust_lr_fn {adjust_lr_fn!r}, expected "original" or "match_rms_adamw"')
        if ns_dtype not in (torch.float32, torch.bfloat16):
            raise usage_error(f"Muon: found ns_dtype {ns_dtype}, expected torch.float32 or torch.bfloat16")
        core = _C.make_muon(
            unit_of(model),
            lr=float(lr),
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_coefficients=tuple(map(float, ns_coefficients)),
            ns_eps=eps,
            ns_steps=ns_steps,
            match_rms_adamw=adjust_lr_fn == "match_rms_adamw",
            bfloat16_iterations=ns_dtype == torch.bfloat16,
            adamw=_patterns(adamw),
            adamw_lr_scale=adamw_lr_scale,
            adamw_betas=tuple(map(float, adamw_betas)),
            adamw_eps=adamw_eps,
            no_decay=_patterns(no_decay),
            rules=_rules(rules),
        )
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn,
            "adamw_lr_scale": adamw_lr_scale, "adamw_betas": adamw_betas, "adamw_eps": adamw_eps,
        }  # fmt: skip
        super().__init__(model, core, defaults)


@torch.no_grad()
def gradient_norm(model: nn.Module, norm_type: float = 2.0) -> Tensor:
    """Returns the norm of all gradients of `model` as one vector, a 0-dim float32 tensor, the same on every rank.

    Powers are added in float64, every element once. `norm_type`: above 0, infinity for the largest absolute value.
    Parameters without gradient count as zero. Collective. Counterpart: torch.nn.utils.get_total_norm. Errors: "usage"
    while micro-batches wait to be reduced, and for another norm_type.
    """
    return _norm_tensor(_C.gradient_norm(unit_of(model), float(norm_type)))


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scales all gradients of `model` by min(1, max_norm / (norm + 1e-6)), and returns the norm before, 0-dim.

    A norm that is not finite scales nothing (PyTorch: everything becomes NaN or zero); with `error_if_nonfinite` it is
    an error of kind "numeric", on every rank. `max_norm` 0 makes every gradient zero, as in PyTorch. `foreach` is
    without effect. Collective. Counterpart: torch.nn.utils.clip_grad_norm_, which takes the parameters and is refused
    for shards: it would clip by one rank's norm. Errors: as `gradient_norm`.
    """
    unit = unit_of(model)
    if max_norm < 0 or math.isnan(max_norm):
        raise usage_error(f"clip_grad_norm_: found max_norm {max_norm}, expected 0 or more; gradient_norm() measures")
    norm = _C.clip_grad_norm(unit, float(max_norm), float(norm_type))
    if max_norm == 0 and math.isfinite(norm):
        for part in _C.parameter_parts(unit):
            if part.shard.grad is not None:
                part.shard.grad.zero_()
    if error_if_nonfinite and not math.isfinite(norm):
        error = _C.Error(
            f"clip_grad_norm_: found a norm of {norm}, expected a finite one; first parameters concerned: "
            f"{', '.join(nonfinite_parameters(model, 3)) or 'none'}"
        )
        error.kind = "numeric"
        raise error
    return _norm_tensor(norm)


def _norm_tensor(norm: float) -> Tensor:
    return torch.tensor(norm, dtype=torch.float32, device=world().device)


def nonfinite_parameters(model: nn.Module, most: int = 10) -> list[str]:
    """Returns the names of the first `most` parameters whose gradient or value is not finite on any rank.

    In the order of the model. Collective.
    """
    return list(_C.nonfinite_parameters(unit_of(model), most))


class GradScaler:
    """Scales the loss of a model that computes in float16, so that small gradients are not lost.

    Calls in torch.amp.GradScaler's order: `scaler.scale(loss).backward()`, `clip_grad_norm_(model, ...)` where wanted,
    `scaler.step(optimizer)`, `scaler.update()`. Two things differ. The division that averages gradients divides by the
    scale as well, so `.grad` is never scaled: norms and clips need no `unscale_()`, which does nothing here. And all
    ranks look at the norm of all gradients, so that they leave out the same steps; torch.amp.GradScaler looks at one
    rank's part, and is refused for shards. The policy needs `loss_scaling=True`.

    `init_scale`, `growth_factor`, `backoff_factor`, `min_scale` are powers of two, so that scaling rounds nothing;
    below `min_scale` a step that is not finite is an error of kind "numeric". One scaler a model, made after the
    outermost fully_shard. Errors: "config" for numbers that are none of these, "usage" for a model that has one.
    """

    def __init__(
        self,
        model: nn.Module,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = 1.0,
    ) -> None:
        """With `enabled` False losses stay as they are, and step() always steps."""
        self._model = weakref.ref(model)
        self._numbers = {
            "growth_factor": growth_factor, "backoff_factor": backoff_factor, "growth_interval": growth_interval,
        }  # fmt: skip
        self._bound: _C.GradScaler | None = None
        self._norm: float | None = None
        if enabled:
            self._bound = _C.GradScaler(
                unit_of(model), init_scale, growth_factor, backoff_factor, growth_interval, min_scale
            )

    def is_enabled(self) -> bool:
        """Whether losses are scaled."""
        return self._bound is not None

    def get_scale(self) -> float:
        """Returns the scale, the same on every rank; 1.0 where it is not enabled."""
        return 1.0 if self._bound is None else self._bound.scale

    @overload
    def scale(self, outputs: Tensor) -> Tensor: ...
    @overload
    def scale(self, outputs: Iterable[Tensor]) -> Iterable[Tensor]: ...
    def scale(self, outputs: Tensor | Iterable[Tensor]) -> Tensor | Iterable[Tensor]:
        """Returns the loss times the scale, in float32 at least; of several losses a list or tuple of them."""
        if self._bound is None:
            return outputs
        if isinstance(outputs, Tensor):
            return self._bound.scaled(outputs)
        scaled = [self._bound.scaled(output) for output in outputs]
        return tuple(scaled) if isinstance(outputs, tuple) else scaled

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Does nothing: gradients on the shards are not scaled."""

    def step(self, optimizer: torch.optim.Optimizer, *, norm: Tensor | float | None = None) -> Any:
        """Steps `optimizer`, of tessera or of torch.optim over shards, unless a gradient is not finite on any rank.

        `norm`: of all gradients, as clip_grad_norm_() or gradient_norm() returned it; None: measured here, which is
        collective. Returns what optimizer.step() does, or None. Counterpart: torch.amp.GradScaler.step.
        """
        if self._bound is None:
            return optimizer.step()
        found = _C.gradient_norm(self._unit(), math.inf) if norm is None else float(norm)
        self._norm = found if self._norm is None or math.isfinite(self._norm) else self._norm
        return optimizer.step() if math.isfinite(found) else None

    def update(self, new_scale: None = None) -> None:
        """Moves the scale by what the step() calls since the last update() have found. Once a step, on every rank.

        Errors: "usage" without a step() before and for a new_scale; "numeric", naming parameters, where the scale
        cannot fall any more.
        """
        if self._bound is None:
            return
        if new_scale is not None:
            raise usage_error(
                "GradScaler.update: found a new_scale, expected none; load_state_dict() sets a scale, which is a "
                "power of two"
            )
        if self._norm is None:
            raise usage_error("GradScaler.update: found no step() since the last one, expected scaler.step(optimizer)")
        norm, self._norm = self._norm, None
        self._bound.update(self._unit(), norm)

    def state_dict(self) -> dict[str, Any]:
        """Returns torch.amp.GradScaler's keys, and "_skipped_steps"; {} where it is not enabled."""
        if self._bound is None:
            return {}
        scale, good_steps, skipped_steps = self._bound.state
        return {"scale": scale, **self._numbers, "_growth_tracker": good_steps, "_skipped_steps": skipped_steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resumes at a scale that state_dict() gave, here or of torch.amp.GradScaler.

        Errors: "config" for a scale that is no power of two or below min_scale, and for another growth than this
        one's; "usage" in the middle of a step.
        """
        if self._bound is None:
            return
        for name, own in self._numbers.items():
            if state_dict.get(name, own) != own:
                error = _C.Error(
                    f"GradScaler.load_state_dict: found {name} {state_dict[name]}, expected {own}, with which this one "
                    "was made; make it with that value"
                )
                error.kind = "config"
                raise error
        self._bound.restore(
            float(state_dict["scale"]), int(state_dict["_growth_tracker"]), int(state_dict.get("_skipped_steps", 0))
        )

    def _unit(self) -> _C.Unit:
        model = self._model()
        if model is None:
            raise usage_error("GradScaler: found that the model it was made for is gone, expected it to live as long")
        return unit_of(model)


def _refuse_before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """Before any step of any optimizer: refuses what shards or their gradients are not made for."""
    if isinstance(optimizer, ShardedOptimizer):
        return
    from tessera._parameter import ShardedParameter

    shards = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, ShardedParameter)]
    if not shards:
        return
    name = type(optimizer).__name__
    for refused, advice in _NOT_ELEMENTWISE:
        if isinstance(optimizer, getattr(torch.optim, refused, ())):
            raise usage_error(
                f"{name}: found shards of a sharded module among its parameters, expected whole tensors: "
                f"torch.optim.{refused} reads shapes or norms of whole parameters, and a rank has a part of each; "
                f"{advice}"
            )
    if isinstance(optimizer, torch.optim.SGD):  # adds tensors of two dtypes
        return
    for shard in shards:
        gradient = shard.grad if shard.dtype.itemsize == 2 else None
        if gradient is not None and gradient.dtype != shard.dtype:
            raise usage_error(
                f"{name}: found the gradient of parameter {shard._name} in {gradient.dtype}, as its contract says, "
                f"expected {shard.dtype} like its shard, since torch.optim mixes no dtypes; use tessera.AdamW, which "
                'keeps the bits that the shard lacks, or MixedPrecisionPolicy(master="none") for gradients in the '
                "dtype of the shard"
            )


register_optimizer_step_pre_hook(_refuse_before_step)
