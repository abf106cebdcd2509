"""The tensors among the arguments and results of a call: found in containers, and replaced there.

[Note: containers] A list or dict that the module changes has to be the caller's own. So tensors are put into the lists,
dicts and dataclasses that are there, and the caller's tensors are put back when the call has ended; tuples are made
again. Objects of other classes pass as they are. Next: _unit.py.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def find(value: Any, found: list[Tensor]) -> None:
    """Appends the tensors in `value` to `found`, in the order in which `put` replaces them."""
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for each in value:
            find(each, found)
    elif isinstance(value, dict):
        for each in value.values():
            find(each, found)
    elif _is_dataclass(value):
        for field in dataclasses.fields(value):
            find(getattr(value, field.name, None), found)
    elif isinstance(value, UserDict):  # transformers' BatchEncoding is one
        find(value.data, found)


def put(value: Any, tensors: Iterator[Tensor | None], undo: list[Callable[[], None]] | None) -> Any:
    """`value` with the next of `tensors` in the place of each tensor, where that is not None."""
    if isinstance(value, Tensor):
        replacement = next(tensors)
        return value if replacement is None else replacement
    if isinstance(value, list):
        for place, before in enumerate(value):
            after = put(before, tensors, undo)
            if after is not before:
                value[place] = after
                if undo is not None:
                    undo.append(functools.partial(_restore_item, value, place, after, before))
        return value
    if isinstance(value, tuple):
        items = [put(each, tensors, undo) for each in value]
        if all(after is before for after, before in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        for key, before in list(value.items()):
            after = put(before, tensors, undo)
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
            after = put(before, tensors, undo)
            if after is not before:
                object.__setattr__(result, field.name, after)
                if undo is not None and not frozen:
                    undo.append(functools.partial(_restore_field, value, field.name, after, before))
        return result
    if isinstance(value, UserDict):
        put(value.data, tensors, undo)
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
