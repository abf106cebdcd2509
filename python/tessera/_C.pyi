"""The extension module: the C++ library as this package calls it (python/binding)."""

from collections.abc import Sequence

import torch
from torch import Tensor

class Error(RuntimeError):
    kind: str

# policy.cpp

class PrecisionRule:
    def __init__(
        self,
        match: Sequence[str],
        *,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        storage_dtype: torch.dtype | None = None,
        accumulate_dtype: torch.dtype | None = None,
        grad_dtype: torch.dtype | None = None,
        pin: bool | None = None,
        widen: bool | None = None,
        frozen: str | None = None,
    ) -> None: ...

class PrecisionPolicy:
    def __init__(
        self,
        *,
        param_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        cast_forward_inputs: bool,
        storage_dtype: torch.dtype | None,
        accumulate_dtype: torch.dtype | None,
        final_dtype: torch.dtype | None,
        param_rounding: str,
        intrinsic: str,
        on_narrower_request: str,
        master: str,
        no_decay: Sequence[str] | None,
        loss_scaling: bool,
        rules: Sequence[PrecisionRule],
    ) -> None: ...

# module.cpp

class Tree:
    def __init__(self) -> None: ...
    def add_parameter(self, name: str, tensor: Tensor) -> None: ...
    def add_buffer(self, name: str, tensor: Tensor) -> None: ...
    def add_tree(self, name: str, child: Tree) -> None: ...
    def add_unit(self, name: str, child: Unit) -> None: ...

class UnshardHandle:
    """A gather that was started by `unshard(async_op=True)`."""

    def wait(self) -> None:
        """Returns when the parameters can be read. A second call does nothing. Errors: "comm"."""

class UnitCall:
    def __init__(self, unit: Unit) -> None: ...
    def enter(self, tensors: list[Tensor]) -> list[Tensor | None] | None: ...
    def leave(self, tensors: list[Tensor]) -> list[Tensor | None] | None: ...
    def fail(self, why: str) -> None: ...
    def stop(self) -> None: ...

class Unit:
    def __init__(
        self,
        tree: Tree,
        mesh: Mesh,
        policy: PrecisionPolicy,
        *,
        name: str,
        reshard_after_forward: bool | None,
        merge_below_bytes: int,
        divide_factor: float | None,
        output_dtype: torch.dtype | None,
        ignored: Sequence[Tensor],
        tied: Sequence[Sequence[str]],
        unstored_buffers: Sequence[str],
    ) -> None: ...
    def contract(
        self,
    ) -> tuple[str, list[dict[str, object]], list[dict[str, object]], list[dict[str, object]]]: ...
    def ignored_names(self) -> list[str]: ...
    def shards(self) -> list[tuple[str, str, list[str], list[int], Tensor, int, int]]: ...
    def full_parameters(self, only: str | None) -> list[tuple[str, Tensor]]: ...
    def full_gradients(self, only: str | None) -> list[tuple[str, Tensor]]: ...
    def set_requires_gradient_sync(self, value: bool, recurse: bool) -> None: ...
    def set_requires_all_reduce(self, value: bool) -> None: ...
    def set_is_last_backward(self, value: bool) -> None: ...
    def set_reshard_after_forward(self, value: bool, recurse: bool) -> None: ...
    def set_reshard_after_backward(self, value: bool, recurse: bool) -> None: ...
    def set_unshard_in_backward(self, value: bool) -> None: ...
    def set_forward_prefetch(self, units: Sequence[Unit]) -> None: ...
    def set_backward_prefetch(self, units: Sequence[Unit]) -> None: ...
    def set_gradient_divide_factor(self, factor: float, recurse: bool) -> None: ...
    def set_trainable(
        self, changes: Sequence[tuple[Sequence[str], bool, bool]], follow: Sequence[Optimizer]
    ) -> None: ...
    def unshard(self) -> None: ...
    def unshard_async(self) -> UnshardHandle: ...
    def reshard(self) -> None: ...
    def zero_grad(self, set_to_none: bool) -> None: ...
