"""What a sharded module's parameters() are: this rank's shards, and their gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor, nn

from tessera._world import UNIT, usage_error

if TYPE_CHECKING:
    from ._module import FSDPModule
    from ._policy import ParameterContract


# Functions that read a tensor as a whole: of a shard they would give one rank's share of the answer.
_READ_WHOLE = frozenset(
    {
        "norm",
        "vector_norm",
        "linalg_norm",
        "linalg_vector_norm",
        "linalg_matrix_norm",
        "matrix_norm",
        "_foreach_norm",
        "_amp_foreach_non_finite_check_and_unscale_",
    }
)


def _refusal(name: str) -> Exception:
    return usage_error(
        f"{name}: found a shard or the gradient of one, expected a whole tensor: every rank would find that of its own "
        "part; use tessera.clip_grad_norm_(model, max_norm), tessera.gradient_norm(model), tessera.GradScaler, or "
        "parameter.full_tensor() and full_grad()"
    )


_ASKS_FOR_GRADIENTS = (torch.autograd.backward, torch.autograd.grad)


def _refuse_inputs(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuses backward(inputs=) and torch.autograd.grad of shards, which no graph leads to: they would find nothing."""
    inputs = kwargs.get("inputs") if func is torch.autograd.backward else args[1]
    for each in inputs or ():
        if isinstance(each, ShardedParameter):
            what = "backward(inputs=)" if func is torch.autograd.backward else "torch.autograd.grad"
            raise usage_error(
                f"{what}: found parameter {each._name} of a sharded module among the inputs, expected none: gradients "
                "come to a shard from the reduction, and no graph leads there; call loss.backward(), after which each "
                "shard has its .grad, and full_grad() is the whole one"
            )


_data_of_tensor: Any = Tensor.data.__get__  # type: ignore[attr-defined]


def _elementwise(
    cls: type,
    func: Callable[..., Any],
    types: Sequence[type],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """`__torch_function__` of shards and their gradients: refuses what reads them as if they were whole."""
    name = getattr(func, "__name__", "")
    if name in _READ_WHOLE:
        raise _refusal(name)
    if func in _ASKS_FOR_GRADIENTS:
        _refuse_inputs(func, args, kwargs or {})
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


# Steps on the way to a norm, or to a branch that ranks have to take alike.
_REDUCTIONS = frozenset({"sum", "mean", "amax", "amin", "max", "min", "std", "var", "all", "any", "dot", "vdot", "cat"})
# Results of these are refused the same things.
_STILL_A_GRADIENT = frozenset(
    {"detach", "clone", "float", "double", "to", "flatten", "view", "reshape", "ravel"}
    | {"pow", "__pow__", "square", "abs", "isfinite", "isinf", "isnan"}
)


class ShardedGradient(Tensor):
    """The gradient of a shard: [elements of the shard], final dtype of the contract.

    Elementwise operations are those of any tensor. Norms, sums and the like are refused: one rank's part has another
    norm than the whole gradient, and ranks would clip by different ones.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _REDUCTIONS and not (name in ("max", "min") and len(args) > 1 and isinstance(args[1], Tensor)):
            raise _refusal(name)
        result = _elementwise(cls, func, types, args, kwargs)
        is_data = name == "__get__" and func == _data_of_tensor
        if (is_data or name in _STILL_A_GRADIENT) and type(result) is Tensor:
            result.__class__ = ShardedGradient
        return result


_grad_of_tensor: Any = Tensor.grad
_requires_grad_of_tensor: Any = Tensor.requires_grad


class ShardedParameter(nn.Parameter):
    """This rank's part of one parameter: elements `range` of the flattened whole, in the storage dtype, 1-D.

    Ranks have parts of different lengths, which may be empty. Optimizers that work element by element step it as they
    would the whole; `ndim` and `shape` are those of the part, and norms are refused. FSDP2's counterpart is a DTensor.
    """

    __torch_function__: Any = classmethod(_elementwise)

    # Set by `stamp`.
    _module: weakref.ref[FSDPModule]
    _name: str
    _global_shape: torch.Size
    _range: tuple[int, int]

    @property
    def global_shape(self) -> torch.Size:
        """The shape of the whole parameter."""
        return self._global_shape

    @property
    def range(self) -> tuple[int, int]:
        """(begin, end): this rank has these elements of the flattened whole."""
        return self._range

    def _owner(self) -> FSDPModule:
        module = self._module()
        if module is None:
            raise usage_error(
                f"parameter {self._name}: found its module gone, expected it to live; keep the sharded module"
            )
        return module

    @property
    def contract(self) -> ParameterContract:
        """Its dtypes, and the reasons for them."""
        return self._owner().contract()[self._name]

    def full_tensor(self) -> Tensor:
        """Returns the whole parameter, [global_shape], storage dtype. Collective.

        Gathers what its module has, bucket by bucket: for several parameters take `full_parameters(module)`.
        """
        return cast(Tensor, self._owner().__dict__[UNIT].full_parameters({self._name})[0][1])

    def full_grad(self) -> Tensor | None:
        """Returns the whole gradient, [global_shape], final dtype; None for a frozen parameter. Collective.

        As `full_tensor()`; for several parameters take `full_gradients(module)`.
        """
        found = self._owner().__dict__[UNIT].full_gradients({self._name})
        return cast(Tensor, found[0][1]) if found else None

    @property
    def grad(self) -> Tensor | None:
        gradient = cast("Tensor | None", _grad_of_tensor.__get__(self))
        if gradient is not None and type(gradient) is Tensor:
            gradient.__class__ = ShardedGradient
        return gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _grad_of_tensor.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _grad_of_tensor.__delete__(self)

    @property
    def requires_grad(self) -> bool:
        return cast(bool, _requires_grad_of_tensor.__get__(self))

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> ShardedParameter:
        """Refused where it would change something: what is frozen lies elsewhere than what is trained."""
        if requires_grad == self.requires_grad:
            return self
        raise usage_error(
            f"parameter {self._name}: found requires_grad_({requires_grad}) after fully_shard, expected it before; use "
            f"module.set_trainable({self._name!r}, {requires_grad}), which moves it, on all ranks"
        )

    def register_hook(self, hook: Callable[[Tensor], Any]) -> NoReturn:
        """Refused: gradients come to a shard from the reduction, not from autograd."""
        self._refuse_hook("register_hook")

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> NoReturn:
        """Refused as register_hook()."""
        self._refuse_hook("register_post_accumulate_grad_hook")

    def _refuse_hook(self, what: str) -> NoReturn:
        raise usage_error(
            f"{what}: found parameter {self._name} of a sharded module, expected a plain tensor: gradients come to a "
            "shard from the reduction, not from autograd, which would never call the hook; change .grad after backward"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise usage_error(
            f"deepcopy: found parameter {self._name}, of which this rank has a part, expected a plain one; copy the "
            "module before fully_shard, or load tessera.get_model_state_dict(module) into a plain one"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise usage_error(
            f"pickle: found parameter {self._name}, of which this rank has a part, expected a plain one; save "
            "tessera.get_model_state_dict(module), or use tessera.save_checkpoint"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        values = repr(self.detach().as_subclass(Tensor))
        return f"ShardedParameter {self._name}, elements {self._range} of {tuple(self._global_shape)}:\n{values}"


def stamp(shard: Tensor, module: FSDPModule, name: str, shape: Sequence[int], begin: int, end: int) -> ShardedParameter:
    """Makes the library's tensor of a shard a ShardedParameter; the object stays the same one.

    The module that had it first keeps it until `give_to`: `full_tensor()` gathers what that module has, on every rank,
    also where one rank alone has looked at parameters() of a module inside.
    """
    parameter = cast(ShardedParameter, shard)
    if type(shard) is not ShardedParameter:
        shard.__class__ = ShardedParameter
        give_to(parameter, module)
    elif parameter._module() is None:
        give_to(parameter, module)
    parameter._name = name
    parameter._global_shape = torch.Size(shape)
    parameter._range = (begin, end)
    return parameter


def give_to(parameter: ShardedParameter, module: FSDPModule) -> None:
    """From now on the parameter's contract and whole values are asked of `module`."""
    parameter._module = weakref.ref(module)
