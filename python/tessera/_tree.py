"""What fully_shard finds in a module: its tensors under their names, and the units inside.

A parameter that stands in several places, or has no values yet, gets tensor objects of its own there. Next: _module.py.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary

from tessera import _C
from tessera._parameter import ShardedParameter
from tessera._unit import is_sharded, unit_of
from tessera._world import usage_error

LEAVES = WeakTensorKeyDictionary()  # the tensors in the modules of all units


class Tree:
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
            if is_sharded(child):
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
        if id(parameter) in self.ignored or parameter in LEAVES:
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
