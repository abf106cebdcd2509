"""fully_shard: a torch.nn.Module becomes a sharded one, in place, as FSDP2 does it.

The module's class becomes a subclass of its own and of FSDPModule, whose call gathers the parameters, runs the own call
of the module, hooks included, and gives their memory back. The tensors in `_parameters` stay where they are: they have
values inside of a call. `parameters()` of a sharded module are the shards. Next: _optim.py.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading
import types
import weakref
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import _StopRecomputationError
from torch.utils.weak import WeakTensorKeyDictionary

from tessera import _C
from tessera._parameter import ShardedParameter, give_to, stamp
from tessera._policy import MixedPrecisionPolicy, ModelContract, contract_of, policy_of
from tessera._world import Mesh, bound_mesh, track, usage_error, world

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_UNIT = "_tessera_unit"
_IGNORED = "_tessera_ignored"
_CONTENT = "_tessera_content"
M = TypeVar("M", bound=nn.Module)


def unit_of(module: nn.Module, what: str = "fully_shard") -> _C.Unit:
    """The unit of a sharded module. Raises tessera.Error of the kind "usage" where it has none."""
    unit = module.__dict__.get(_UNIT)
    if unit is None:
        name = type(module).__name__
        if isinstance(module, FSDPModule):
            raise usage_error(f"{what}: found {name}, whose World has closed, expected an open one; call it before")
        raise usage_error(f"{what}: found {name}, which is not sharded, expected a module after fully_shard(module)")
    return cast(_C.Unit, unit)


# [Note: containers] A list or dict that the module changes has to be the caller's own. So tensors are put into the
# lists, dicts and dataclasses that are there, and the caller's tensors are put back when the call has ended; tuples are
# made anew. Objects of other classes pass as they are.


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _find(value: Any, found: list[Tensor]) -> None:
    """Appends the tensors in `value` to `found`, in the order in which `_put` replaces them."""
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for each in value:
            _find(each, found)
    elif isinstance(value, dict):
        for each in value.values():
            _find(each, found)
    elif _is_dataclass(value):
        for field in dataclasses.fields(value):
            _find(getattr(value, field.name, None), found)
    elif isinstance(value, UserDict):  # transformers' BatchEncoding is one
        _find(value.data, found)


def _put(value: Any, tensors: Iterator[Tensor | None], undo: list[Callable[[], None]] | None) -> Any:
    """`value` with the next of `tensors` in the place of each tensor, where that is not None."""
    if isinstance(value, Tensor):
        replacement = next(tensors)
        return value if replacement is None else replacement
    if isinstance(value, list):
        for place, before in enumerate(value):
            after = _put(before, tensors, undo)
            if after is not before:
                value[place] = after
                if undo is not None:
                    undo.append(functools.partial(_restore_item, value, place, after, before))
        return value
    if isinstance(value, tuple):
        items = [_put(each, tensors, undo) for each in value]
        if all(after is before for after, before in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        for key, before in list(value.items()):
            after = _put(before, tensors, undo)
            if after is not before:
                value[key] = after
                if undo is not None:
                    undo.append(functools.partial(_restore_item, value, key, after, before))
        return value
    if _is_dataclass(value):
        frozen = value.__dataclass_params__.frozen
        result = copy.copy(value) if frozen else value
        for field in dataclasses.fields(value):
            before = getattr(value, field.name, None)
            after = _put(before, tensors, undo)
            if after is not before:
                object.__setattr__(result, field.name, after)
                if undo is not None and not frozen:
                    undo.append(functools.partial(_restore_field, value, field.name, after, before))
        return result
    if isinstance(value, UserDict):
        _put(value.data, tensors, undo)
    return value


def _restore_item(container: Any, key: Any, after: Any, before: Any) -> None:
    if isinstance(container, list):
        if key < len(container) and container[key] is after:
            container[key] = before
        else:  # the module has moved it
            for place, item in enumerate(container):
                if item is after:
                    container[place] = before
    elif container.get(key) is after:
        container[key] = before


def _restore_field(value: Any, name: str, after: Any, before: Any) -> None:
    if getattr(value, name, None) is after:
        setattr(value, name, before)


def _call(module: FSDPModule, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """function(*args, **kwargs) as one call of the module's unit.

    No variable here may hold a tensor of the result while `leave` looks at who does: the caller may change a result in
    place where nobody else has it.
    """
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        raise _transform_refused(module)
    call = _C.UnitCall(unit_of(module, "forward"))
    module.__dict__[_CONTENT].require_same()
    undo: list[Callable[[], None]] = []
    _calls.enter()
    try:
        tensors: list[Tensor] = []
        _find(args, tensors)
        _find(kwargs, tensors)
        replaced = call.enter(tensors)
        del tensors
        if replaced is not None:
            places = iter(replaced)
            args = _put(args, places, undo)
            kwargs = _put(kwargs, places, undo)
            del places, replaced
        result = function(*args, **kwargs)
        tensors = []
        _find(result, tensors)
        replaced = call.leave(tensors)
        del tensors
        return result if replaced is None else _put(result, iter(replaced), None)
    except _StopRecomputationError:
        call.stop()
        raise
    except BaseException as error:
        call.fail(f"{type(error).__name__}: {error}")
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


class _Content:
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
        _find,
        _put,
        _is_dataclass,
        _restore_item,
        _restore_field,
        _call,
        _Calls.enter,
        _Calls.leave,
        _Content.require_same,
    )
    frames: Any = torch._C._dynamo.eval_frame
    for function in functions:
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
        frames.set_code_exec_strategy(function.__code__, skip)
        function._torchdynamo_disable = True


_hide_from_dynamo()


class _Tree:
    """The tensors of a module as the library wants them, and what is found on the way."""

    def __init__(self, root: nn.Module, ignored: Iterable[nn.Parameter]) -> None:
        self.ignored = {id(parameter) for parameter in ignored}
        self.unstored: list[str] = []
        self.tied: dict[int, list[str]] = {}
        self.replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        self.modules: list[nn.Module] = []
        self._trees: dict[int, _C.Tree] = {}
        self._first: dict[int, str] = {}
        self.leaves: list[nn.Parameter] = []
        self._without_memory: dict[int, nn.Parameter] = {}
        try:
            self.tree = self._of(root, "")
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """The module as it was."""
        for module, key, parameter in self.replaced:
            module._parameters[key] = parameter

    def _of(self, module: nn.Module, path: str) -> _C.Tree:
        known = self._trees.get(id(module))
        if known is not None:
            return known
        if isinstance(module, torch.jit.ScriptModule):
            raise usage_error(f"fully_shard: found the ScriptModule {path or 'itself'}, expected a Python module")
        self.modules.append(module)
        tree = self._trees[id(module)] = _C.Tree()
        for key, parameter in module._parameters.items():
            if parameter is not None:
                tree.add_parameter(key, self._leaf(module, key, path + key, parameter))
        for key, buffer in module._buffers.items():
            if buffer is not None:
                if buffer.is_meta:  # buffers stay the same objects, so that a load cannot give it memory
                    raise usage_error(
                        f"fully_shard: found the buffer {path + key} on the meta device, expected one with values; "
                        "set it on the module, on the device that computes, before fully_shard"
                    )
                tree.add_buffer(key, buffer)
                if key in module._non_persistent_buffers_set:
                    self.unstored.append(path + key)
        for key, child in module._modules.items():
            if child is None:
                continue
            if isinstance(child, FSDPModule):
                tree.add_unit(key, unit_of(child))
            else:
                tree.add_tree(key, self._of(child, f"{path}{key}."))
        return tree

    def _leaf(self, module: nn.Module, key: str, path: str, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter; in the second place of a tied one another tensor object over the same memory, so that
        autograd does not add the gradients of two places before the sink does, in the dtype that it adds in."""
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise usage_error(
                f"fully_shard: found the parameter {path} without a shape, expected all shapes known; run the module "
                "once, before fully_shard"
            )
        if is_traceable_wrapper_subclass(parameter) and id(parameter) not in self.ignored:
            raise usage_error(
                f"fully_shard: found the parameter {path} as {type(parameter).__name__}, expected a plain tensor; make "
                "the module without, or name the parameter in ignored_params"
            )
        if id(parameter) in self.ignored or parameter in _leaves:
            return parameter  # one that a unit has already stays one object: its memory is that unit's
        if parameter.is_meta:
            parameter = self._of_no_memory(module, key, parameter)
        self.leaves.append(parameter)
        first = self._first.setdefault(id(parameter), path)
        if first == path or isinstance(parameter, ShardedParameter):
            return parameter
        place = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        place.__dict__.update(parameter.__dict__)
        _C.copy_grad_dtype(parameter, place)
        self.replaced.append((module, key, parameter))
        module._parameters[key] = place
        self.leaves.append(place)
        self.tied.setdefault(id(parameter), [first]).append(path)
        return place

    def _of_no_memory(self, module: nn.Module, key: str, parameter: nn.Parameter) -> nn.Parameter:
        """What the library takes for a parameter that has no values yet: its shape, and memory of no bytes."""
        known = self._without_memory.get(id(parameter))
        if known is None:
            values = torch.empty(parameter.shape, dtype=parameter.dtype)
            values.untyped_storage().resize_(0)
            known = nn.Parameter(values, requires_grad=parameter.requires_grad)
            known.__dict__.update(parameter.__dict__)
            _C.copy_grad_dtype(parameter, known)
            self._without_memory[id(parameter)] = known
        self.replaced.append((module, key, parameter))
        module._parameters[key] = known
        return known


def _sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    made = _classes.get(cls)
    if made is None:
        made = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})
        _classes[cls] = made
    return made


# The tensors in the modules of all units.
_leaves = WeakTensorKeyDictionary()
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
        reshard_after_forward: whether parameters are given back after forward and gathered again in backward. None:
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
            "parameters are kept whole, or given back to all ranks"
        )
    if world().aborted:
        raise usage_error(
            "fully_shard: found the World after an error of this run, expected one that works; call "
            "tessera.world().recover() on every rank first"
        )
    policy, output_dtype = policy_of(MixedPrecisionPolicy() if mp_policy is None else mp_policy)
    ignored = list(ignored_params or ())
    tree = _Tree(module, ignored)
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
        _leaves[leaf] = None
    cast(Any, module).__class__ = _sharded_class(type(module))
    module.__dict__[_UNIT] = unit
    module.__dict__[_IGNORED] = tree.ignored
    module.__dict__[_CONTENT] = _Content(tree.modules)
    track(module)
    _stamp_all(module)
    return module


def _stamp_all(module: nn.Module) -> None:
    """The library's tensors of all shards are ShardedParameters of `module` from here on, whoever asks for them."""
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
        """A slice of a sharded Sequential, and whatever else makes a module of this class, is a plain module."""
        plain = cls.__mro__[2]
        made = plain.__new__(plain, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _call(self, super().__call__, args, kwargs)

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
        """False: HSDP's sum over copies of the model waits for a backward with True. For the whole model, whatever
        `recurse` says."""
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
        """Gathers this unit now, until a backward or reshard() gives it back. With `async_op` it returns at once, an
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
        be made anew. `frozen_as`: "shard", or "replicate" (whole on each rank, in the compute dtype). Errors: "usage"
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
    """Refuses a parameter that nobody would train."""
    from tessera import _state

    if parameter in _leaves or _state.holds_whole():
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
    def call(self: FSDPModule, *args: Any, **kwargs: Any) -> Any:
        return _call(self, functools.partial(plain, self) if plain is not method else plain, args, kwargs)

    setattr(module, method_name, types.MethodType(call, module))
