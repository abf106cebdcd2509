"""fully_shard: a torch.nn.Module becomes a sharded one, in place, as FSDP2 does it.

The module's class becomes a subclass of its own and of FSDPModule, whose call gathers the parameters, runs the own call
of the module, hooks included, and gives their memory back. The tensors in `_parameters` stay where they are: they have
values inside of a call. `parameters()` of a sharded module are the shards. Next: _optim.py.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn

from tessera import _C
from tessera._parameter import ShardedParameter, give_to, stamp
from tessera._policy import MixedPrecisionPolicy, ModelContract, contract_of, policy_of
from tessera._tree import LEAVES, Tree
from tessera._unit import CONTENT, Content, call, unit_of
from tessera._world import UNIT, Mesh, bound_mesh, track, usage_error, world

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_IGNORED = "_tessera_ignored"
M = TypeVar("M", bound=nn.Module)


def _sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    made = _classes.get(cls)
    if made is None:
        made = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})
        _classes[cls] = made
    return made


# By the class that each is made of, as long as a module has it. A class refers to what it is made of, so that weak keys
# would live for ever.
_classes: weakref.WeakValueDictionary[type[nn.Module], type[nn.Module]] = weakref.WeakValueDictionary()


def fully_shard(
    module: M,
    *,
    mesh: Mesh | DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: None = None,
    mp_policy: Any = None,
    offload_policy: None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    name: str = "",
    merge_below_bytes: int = 0,
    divide_factor: float | None = None,
) -> M:
    """Shards all parameters under `module` that no sharded module inside has, as one unit, and returns `module`.

    Call it on inner modules first. Afterwards `module` is an FSDPModule too, its parameters() are this rank's shards,
    1-D, and calling it gathers, computes and gives memory back. Counterpart: torch.distributed.fsdp.fully_shard.

    Args:
        mesh: None (all ranks), tessera.Mesh, or a DeviceMesh of one dim (dp_shard) or two (dp_replicate, dp_shard).
        reshard_after_forward: whether parameters are freed after forward and gathered again in backward. None:
            True, but for the outermost module.
        mp_policy: tessera.MixedPrecisionPolicy, or FSDP2's. Dtypes of parameters of one unit may differ.
        ignored_params: parameters that stay as they are, whole on each rank; nothing sums their gradients.
        name: of the module in the whole model, in front of its parameters' names; "" is taken from its place in the
            module that is sharded around it.
        merge_below_bytes: units inside that are smaller (bytes in the compute dtype) are gathered with the outermost.
        divide_factor: gradients are divided by it; None is the number of ranks.

    Values are taken from the module of each rank, and those of rank 0 are not sent around: make them equal. Parameters
    on the meta device have none until a state dict or a checkpoint is loaded. Each place of a tied parameter gets a
    tensor object of its own. Collective. Errors: tessera.Error, of the kind "contract" naming the parameter (dtypes,
    rules, ranks that disagree), "usage".
    """
    if shard_placement_fn is not None:
        raise usage_error(
            "fully_shard: found shard_placement_fn, expected none: a unit is cut as one row of elements; leave it out"
        )
    if offload_policy is not None and type(offload_policy).__name__ != "OffloadPolicy":
        raise usage_error(
            f"fully_shard: found offload_policy {type(offload_policy).__name__}, expected none: parameters stay where "
            "they compute; leave it out"
        )
    if not isinstance(module, nn.Module):
        raise usage_error(
            f"fully_shard: found {type(module).__name__}, expected one torch.nn.Module; shard the modules of a list "
            "one by one"
        )
    if isinstance(module, FSDPModule):
        raise usage_error(
            f"fully_shard: found {type(module).__name__}, which is sharded already, expected a plain module"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise usage_error("fully_shard: found a ScriptModule, expected a Python module; shard what it was made from")
    if type(module).forward is nn.Module.forward and "forward" not in module.__dict__:
        raise usage_error(
            f"fully_shard: found {type(module).__name__}, which has no forward, expected one that is called; shard "
            "its children, or the module around it"
        )
    if isinstance(reshard_after_forward, int) and not isinstance(reshard_after_forward, bool):
        raise usage_error(
            f"fully_shard: found reshard_after_forward={reshard_after_forward}, expected True, False or None; "
            "parameters are kept whole, or returned to all ranks"
        )
    if world().aborted:
        raise usage_error(
            "fully_shard: found the World after an error of this run, expected one that works; call "
            "tessera.world().recover() on every rank first"
        )
    policy, output_dtype = policy_of(MixedPrecisionPolicy() if mp_policy is None else mp_policy)
    ignored = list(ignored_params or ())
    tree = Tree(module, ignored)
    try:
        unit = _C.Unit(
            tree.tree,
            bound_mesh(mesh),
            policy,
            name=name,
            reshard_after_forward=reshard_after_forward,
            merge_below_bytes=merge_below_bytes,
            divide_factor=divide_factor,
            output_dtype=output_dtype,
            ignored=ignored,
            tied=list(tree.tied.values()),
            unstored_buffers=tree.unstored,
        )
    except BaseException:
        tree.undo()
        raise
    for leaf in tree.leaves:
        LEAVES[leaf] = None
    cast(Any, module).__class__ = _sharded_class(type(module))
    module.__dict__[UNIT] = unit
    module.__dict__[_IGNORED] = tree.ignored
    module.__dict__[CONTENT] = Content(tree.modules)
    track(module)
    _stamp_all(module)
    return module


def _stamp_all(module: nn.Module) -> None:
    """The library's tensors of all shards are ShardedParameters of `module` from here on, for every reader."""
    for parameter in module.parameters():
        if isinstance(parameter, ShardedParameter):
            give_to(parameter, cast(FSDPModule, module))


class _InNoDDP:
    """Stands where DistributedDataParallel, which accelerate's prepare() makes, reads names before anything else."""

    def __iter__(self) -> NoReturn:
        raise usage_error(
            "DistributedDataParallel: found a sharded module, expected a plain one: it would send rank 0's shards to "
            "the other ranks, and reduce nothing; call the sharded module itself, and leave it out of accelerate's "
            "prepare()"
        )


class FSDPModule(nn.Module):
    """What a sharded module has besides what its own class has. Counterpart: torch.distributed.fsdp.FSDPModule.

    Controls (`set_...`) do not communicate: call them with the same values at the same place on every rank. The next
    collective raises an error that names a difference.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A slice of a sharded Sequential, and any other call that makes a module of this class, is a plain module."""
        plain = cls.__mro__[2]
        made = plain.__new__(plain, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return call(self, super().__call__, args, kwargs)

    # Contracts and whole tensors.

    def contract(self) -> ModelContract:
        """Returns what all ranks have agreed on: dtypes of parameters, buffers and units, with reasons.

        `str()` of it is the table.
        """
        return contract_of(unit_of(self, "contract"))

    # parameters()

    def _named_shards(self) -> dict[str, ShardedParameter]:
        """By every name that a parameter has in this module."""
        result: dict[str, ShardedParameter] = {}
        for part in _C.parameter_parts(unit_of(self, "parameters")):
            parameter = stamp(part.shard, self, part.contract, part.shape, part.begin, part.end)
            prefix = part.contract.removesuffix(part.own) if part.contract.endswith(part.own) else ""
            result[part.own] = parameter
            for alias in part.aliases:
                result[alias.removeprefix(prefix)] = parameter
        return result

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the names of the plain module, in its order, each with this rank's shard. Ignored parameters are
        themselves. A tied parameter comes under its first name, or with remove_duplicate=False under each."""
        shards = self._named_shards()
        ignored = self.__dict__[_IGNORED]
        modules = list(self.named_modules(remove_duplicate=False)) if recurse else [("", self)]
        # Places in units that were sharded after the first one with the parameter show that one's tensor.
        by_tensor = {
            id(module._parameters[key]): shards[name]
            for path, module in modules
            for key in module._parameters
            if (name := f"{path}.{key}" if path else key) in shards
        }
        seen: set[int] = set()
        for path, module in modules:
            for key, parameter in module._parameters.items():
                if parameter is None:
                    continue
                name = f"{path}.{key}" if path else key
                found = shards.get(name, by_tensor.get(id(parameter)))
                if found is None and (id(parameter) in ignored or _is_ignored_inside(self, parameter)):
                    found = cast(ShardedParameter, parameter)
                if found is None:
                    _require_seen(name, parameter)
                if found is None or (remove_duplicate and id(found) in seen):
                    continue
                seen.add(id(found))
                if found is not parameter:
                    for attribute, value in parameter.__dict__.items():  # what the program has noted on it
                        found.__dict__.setdefault(attribute, value)
                yield (f"{prefix}.{name}" if prefix else name), found

    # State dicts.

    def state_dict(  # type: ignore[override]
        self,
        *args: Any,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Returns whole tensors under the names of the plain module, on every rank. Collective.

        `tessera.get_model_state_dict` has options (rank 0 alone, on the CPU).
        """
        from tessera import _state

        if args:  # as torch.nn.Module still takes them
            named: tuple[Any, ...] = (destination, prefix, keep_vars)
            destination, prefix, keep_vars = (*args, *named[len(args) :])
        return _state.whole_state_dict(self, prefix, keep_vars, destination)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Takes whole tensors under the names of the plain module; each rank keeps its part. Collective.

        Every rank brings the whole dict. Returns missing and unexpected keys, as torch.nn.Module does. Nothing is
        written where something does not fit. Errors: "contract" naming what is missing, unexpected or does not fit.
        """
        from tessera import _state

        return _state.load_whole(self, state_dict, strict, assign)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        from tessera import _state

        if _state.holds_whole():
            super()._load_from_state_dict(*args, **kwargs)
            return
        raise usage_error(
            f"load_state_dict: found {type(self).__name__} sharded inside of a plain module, expected a sharded one; "
            "call load_state_dict of the sharded modules, or shard the outermost module, too"
        )

    # Controls.

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False: backwards leave their gradients unreduced until one with True (gradient accumulation)."""
        unit_of(self).set_requires_gradient_sync(requires_gradient_sync, recurse)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """False: HSDP's sum over copies of the model waits for a backward with True. For the whole model, for any
        `recurse`."""
        unit_of(self).set_requires_all_reduce(requires_all_reduce)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """False: backwards start their reductions and wait for none; the next one with True does, for all."""
        unit_of(self).set_is_last_backward(is_last_backward)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """From the next forward on; see fully_shard."""
        unit_of(self).set_reshard_after_forward(reshard_after_forward, recurse)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """False: parameters that are whole after a backward stay so for the next forward."""
        unit_of(self).set_reshard_after_backward(reshard_after_backward, recurse)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False: the unit is not gathered for a backward that reads no parameter (an embedding's)."""
        unit_of(self).set_unshard_in_backward(unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """While this module computes forward, the parameters of `modules` are gathered, in this order; [] is the order
        that the ranks have agreed on."""
        unit_of(self).set_forward_prefetch([unit_of(module) for module in modules])

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """The same in backward."""
        unit_of(self).set_backward_prefetch([unit_of(module) for module in modules])

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Gradients that are summed from now on are divided by it, those of modules inside too."""
        unit_of(self).set_gradient_divide_factor(factor, True)

    def unshard(self, async_op: bool = False) -> _C.UnshardHandle | None:
        """Gathers this unit now, until a backward or reshard() frees it. With `async_op` it returns at once, an
        object whose wait() ends when the parameters can be read. Collective."""
        unit = unit_of(self, "unshard")
        if async_op:
            return unit.unshard_async()
        unit.unshard()
        return None

    def reshard(self) -> None:
        """Gives the memory of this unit's whole parameters back; on all ranks or on none."""
        unit_of(self, "reshard").reshard()

    def set_trainable(
        self, match: str | Sequence[str], trainable: bool = True, *, frozen_as: Literal["shard", "replicate"] = "shard"
    ) -> None:
        """Freezes or unfreezes the parameters that a pattern matches (see Rule), between steps. Collective.

        Counterpart: requires_grad_() under FSDP2; here frozen and trained parameters lie in memory of their own, and
        those concerned move. Call it on the outermost module. Optimizers of tessera follow; one of torch.optim has to
        be made again. `frozen_as`: "shard", or "replicate" (whole on each rank, in the compute dtype). Errors: "usage"
        in a step or with gradients; "contract" for a pattern that matches nothing.
        """
        from tessera import _optim

        if frozen_as not in ("shard", "replicate"):
            raise usage_error(f'set_trainable: found frozen_as={frozen_as!r}, expected "shard" or "replicate"')
        patterns = [match] if isinstance(match, str) else list(match)
        change = (patterns, trainable, frozen_as == "replicate")
        unit_of(self, "set_trainable").set_trainable([change], _optim.follow(self))
        _stamp_all(self)
        _optim.followed(self)

    def requires_grad_(self: M, requires_grad: bool = True) -> M:
        """set_trainable("*", requires_grad), and the same for ignored parameters. Collective."""
        module = cast(FSDPModule, self)
        for parameter in module.parameters():
            if not isinstance(parameter, ShardedParameter):
                parameter.requires_grad_(requires_grad)
        if any(parameter.requires_grad != requires_grad for parameter in module.parameters()):
            module.set_trainable("*", requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of all shards (or sets them to zero), and of ignored parameters."""
        unit_of(self, "zero_grad").zero_grad(set_to_none)
        if not any(module.__dict__.get(_IGNORED) for module in self.modules()):
            return
        for parameter in self.parameters():
            if not isinstance(parameter, ShardedParameter) and parameter.grad is not None:
                parameter.grad = None if set_to_none else parameter.grad.zero_()

    # What a part of a model cannot do.

    _ddp_params_and_buffers_to_ignore = _InNoDDP()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # The method of torch.nn.Module, perhaps of a module around this one, whose lambda it is.
        called = getattr(fn, "__qualname__", "").split(".")[1:2]
        if called in (["to_empty"], ["share_memory"]):
            raise usage_error(
                f"{called[0]}: found {type(self).__name__}, whose shards lie in memory of their unit, expected a plain "
                "module; call it before fully_shard, and fill parameters that have no memory yet by load_state_dict() "
                "or tessera.load_checkpoint()"
            )
        for tensor in (*self.parameters(), *self.buffers()):
            probe = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            after = fn(probe)
            if (after.dtype, after.device) != (probe.dtype, probe.device):
                raise usage_error(
                    f"{type(self).__name__}: found a change of its tensors from {probe.dtype} on {probe.device} to "
                    f"{after.dtype} on {after.device}, expected none after fully_shard; change dtype or device before, "
                    "or use mp_policy"
                )
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise usage_error(
            f"deepcopy: found {type(self).__name__}, of which this rank has a part, expected a plain module; copy it "
            "before fully_shard, or load module.state_dict() into a plain one"
        )

    def __copy__(self) -> NoReturn:
        raise usage_error(
            f"copy: found {type(self).__name__}, whose call belongs to this object, expected a plain module; copy it "
            "before fully_shard"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise usage_error(
            f"pickle or torch.save: found {type(self).__name__}, of which this rank has a part, expected a plain "
            "module; save tessera.get_model_state_dict(module), or use tessera.save_checkpoint"
        )


def _require_seen(name: str, parameter: nn.Parameter) -> None:
    """Refuses a parameter that no optimizer would train."""
    from tessera import _state

    if parameter in LEAVES or _state.holds_whole():
        return
    raise usage_error(
        f"parameter {name}: found a tensor that was put into the module after fully_shard, expected those that were "
        "there: it would compute, and nothing would reduce its gradient; change the module before fully_shard"
    )


def _is_ignored_inside(module: nn.Module, parameter: nn.Parameter) -> bool:
    return any(id(parameter) in each.__dict__.get(_IGNORED, ()) for each in module.modules())


def full_parameters(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Returns (name, whole tensor in the storage dtype) of each parameter, on every rank. Collective.

    Counterpart: p.full_tensor() of each DTensor.
    """
    return unit_of(module, "full_parameters").full_parameters(None)


def full_gradients(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Returns (name, whole gradient in the final dtype) of each trainable parameter; zeros where it has none.

    Collective. Counterpart: p.grad.full_tensor() of each DTensor.
    """
    return unit_of(module, "full_gradients").full_gradients(None)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes `module.method_name(...)` a call of the unit, as `module(...)` is: parameters are gathered for it.

    Does nothing for a module that is not sharded. Counterpart: torch.distributed.fsdp.register_fsdp_forward_method.
    Errors: "usage" where the module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise usage_error(
            f"register_fsdp_forward_method: found no method {method_name!r} of {type(module).__name__}, expected one"
        )
    plain = getattr(method, "__func__", method)

    @functools.wraps(plain)
    def forward_method(self: FSDPModule, *args: Any, **kwargs: Any) -> Any:
        return call(self, functools.partial(plain, self) if plain is not method else plain, args, kwargs)

    setattr(module, method_name, types.MethodType(forward_method, module))
