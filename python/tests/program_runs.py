"""What each step of a drawn program (programs.py) has to give.

`Run` does each line of a program's `train` with the sharded model and with `Unitwise` (support.py), the same model on
plain autograd with all ranks' batches, and compares results, gradients, norms, buffers and parameters: bits, where the
order of additions is the same on both sides, else within a bound that says where it comes from. The names of this
module are those that a program finds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tessera
import torch
from support import Unitwise, assert_bits, assert_close, cast_floating, drawn, tokens
from tessera import MixedPrecisionPolicy, Rule, fully_shard
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

WIDTH = 4
VOCABULARY = 7
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


# --- the layers of drawn modules: each takes and gives [..., WIDTH], and gives its input's dtype ---


class Linear(nn.Module):
    """A matrix and a bias, in a dtype of its own."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=F64).mul(0.5).to(dtype))
        self.bias = nn.Parameter(torch.randn(WIDTH, dtype=F64).mul(0.5).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias).to(x.dtype)


class Scale(nn.Module):
    """One factor a column."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(WIDTH, dtype=F64).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) * self.weight).to(x.dtype)


class Norm(nn.Module):
    """A layer norm."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(WIDTH, dtype=F64).to(dtype))
        self.bias = nn.Parameter(0.1 * torch.randn(WIDTH, dtype=F64).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.to(self.weight.dtype), (WIDTH,), self.weight, self.bias).to(x.dtype)


class Running(nn.Module):
    """A running mean in a buffer, which no state dict holds, and a count in one that it does."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.shift = nn.Parameter(0.1 * torch.randn(WIDTH, dtype=F64).to(dtype))
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.count += 1
                self.mean.mul_(0.5).add_(x.detach().flatten(0, -2).float().mean(0))
        return x + self.mean.clone().to(x.dtype) * self.shift.to(x.dtype)


class Embed(nn.Module):
    """Rows of a table."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH, dtype=F64).to(dtype))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class Head(nn.Module):
    """A product with a table."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH, dtype=F64).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight).to(x.dtype)


# --- running ---


def module_at(model: nn.Module, path: str) -> Any:
    """Returns the module of a path."""
    return model.get_submodule(path)


def matches(pattern: str, name: str) -> bool:
    """Whether consecutive components of `name` are those of a rule's pattern without wildcards."""
    found, parts = pattern.split("."), name.split(".")
    return any(parts[i : i + len(found)] == found for i in range(len(parts)))


class Run:
    """The lines of one program, done by the sharded model and by the plain one."""

    def __init__(self, source: str, world: Any, shard: Callable[..., Any] = fully_shard) -> None:
        names = dict(globals())
        exec(compile(source, "program", "exec"), names)
        self.world, self.names = world, names
        self.units: dict[str, dict[str, Any]] = names["UNITS"]
        self.model: Any = names["build"]()
        plain = names["build"]()
        self.is_of_tokens = isinstance(plain.first, Embed)
        self.twin = Unitwise(
            plain,
            world.size,
            units=list(self.units),
            compute=self._compute,
            cast=self._cast,
            output=self._output,
            wire=self._wire,
            arrival=lambda name: self._rule(name, "grad_dtype"),
            replicas=names["REPLICAS"],
        )
        for name, master in self.twin.masters.items():
            if self._rule(name, "frozen") == "replicate":  # kept in its compute dtype, to which it is rounded once
                self.twin.masters[name] = master.to(self._compute(name) or master.dtype)
        for path in names["COMPILED"]:
            module_at(self.model, path).compile(backend="aot_eager")
        # aot_eager decomposes functions into others, which round elsewhere.
        self.bound: float | None = 1e-5 if names["COMPILED"] else None
        mesh = tessera.Mesh(dp_replicate=world.size) if names["REPLICAS"] else None
        for path, options in self.units.items():
            shard(module_at(self.model, path), mesh=mesh, **options)
        for duplicates in (False, True):
            found = [name for name, _ in self.model.named_parameters(remove_duplicate=not duplicates)]
            assert found == [name for name, _ in names["build"]().named_parameters(remove_duplicate=not duplicates)]
        self.synced = dict.fromkeys(self.units, True)
        self.results: dict[int, list[tuple[Tensor | None, Any]]] = {}
        self.optimizers: tuple[str, Any, Any, dict[str, nn.Parameter]] | None = None
        self.dropped: tuple[str, int] | None = None

    # What the policy asks for.

    def _policy(self, unit: str) -> MixedPrecisionPolicy | None:
        return self.units[unit].get("mp_policy")

    def _compute(self, name: str) -> torch.dtype | None:
        unit = self.twin.owner[name]
        policy = self._policy(unit)
        if policy is None:
            return None
        if self._rule(name, "pin"):
            return torch.promote_types(self.twin.masters[name].dtype, F32)
        return policy.param_dtype

    def _rule(self, name: str, field: str) -> Any:
        """Returns what a rule of the policy says of a parameter, None for nothing."""
        unit = self.twin.owner[name]
        policy = self._policy(unit)
        inside = name[len(unit) + 1 if unit else 0 :]
        for rule in () if policy is None else policy.rules:
            if getattr(rule, field) is not None and any(matches(pattern, inside) for pattern in rule.match):
                return getattr(rule, field)
        return None

    def _wire(self, name: str) -> torch.dtype | None:
        policy = self._policy(self.twin.owner[name])
        return None if policy is None else policy.reduce_dtype

    def _cast(self, unit: str) -> torch.dtype | None:
        policy = self._policy(unit)
        if policy is None or not policy.cast_forward_inputs:
            return None
        own = [self._compute(name) for name, owner in self.twin.owner.items() if owner == unit]
        return None if own and BF16 not in own else policy.param_dtype

    def _output(self, unit: str) -> torch.dtype | None:
        policy = self._policy(unit)
        return None if policy is None else policy.output_dtype

    # Lines of train().

    def _input(self, seed: int, rank: int) -> Tensor:
        if self.is_of_tokens:
            return tokens(seed, rank, shape=(2, 3), below=VOCABULARY)
        dtype = F64 if self.names["UNITS"] and self._is_wide() else F32
        return drawn(seed, rank, shape=(2, WIDTH), dtype=dtype)

    def _is_wide(self) -> bool:
        return all(master.dtype == F64 for master in self.twin.masters.values())

    def _forward(self, model: Any, seed: int, rank: int, input_grad: bool) -> tuple[Tensor | None, Any]:
        x = self._input(seed, rank)
        leaf = x.requires_grad_() if input_grad else None
        torch.default_generator.manual_seed(8 * seed + rank)  # a tenth of the time of torch.manual_seed
        return leaf, model(x)

    def forward(self, result: int, *, seed: int, input_grad: bool) -> None:
        """Runs the model on this rank's batch, the plain copies on all ranks'; compares the results."""
        made = [self._forward(self.model, seed, self.world.rank, input_grad)]
        made += [self._forward(one, seed, rank, input_grad) for rank, one in enumerate(self.twin.copies)]
        self.results[result] = made
        self._compare_trees("result", made[0][1], made[1 + self.world.rank][1])

    def evaluate(self, *, seed: int) -> None:
        """The same without grad mode, in eval mode."""
        own = self.twin.copies[self.world.rank]
        self.model.eval()
        own.eval()
        with torch.no_grad():
            found = self._forward(self.model, seed, self.world.rank, False)[1]
            self._compare_trees("evaluation", found, self._forward(own, seed, self.world.rank, False)[1])
        self.model.train()
        own.train()

    def forget(self, result: int) -> None:
        """Drops a result that no backward used."""
        del self.results[result]

    def backward(self, *results: int, retain: bool = False) -> None:
        """One backward through the sum of these results' losses."""
        self._backward(0, results, retain)
        for rank in range(self.world.size):
            self._backward(1 + rank, results, retain)
        owner = dict.fromkeys(self.twin.owner, "") if self.names["MERGES"] else self.twin.owner
        self.twin.reduce(name for name, unit in owner.items() if self.synced[unit])
        for result in results:
            made = self.results[result]
            leaf, expected = made[0][0], made[1 + self.world.rank][0]
            if leaf is not None and expected is not None:
                assert (leaf.grad is None) == (expected.grad is None), f"r{result}: the input's gradient"
                if leaf.grad is not None and expected.grad is not None:
                    self._compare("the input's gradient", leaf.grad, expected.grad)
            if not retain:
                del self.results[result]

    def _backward(self, place: int, results: Sequence[int], retain: bool) -> None:
        loss: Tensor | None = None
        for result in results:
            for one in pytree.tree_leaves(self.results[result][place][1]):
                if isinstance(one, Tensor) and one.requires_grad:
                    term = one.double().sin().sum()
                    loss = term if loss is None else loss + term
        assert loss is not None
        loss.backward(retain_graph=retain)

    def drop(self, path: str | None, rank: int = 0) -> None:
        """From now on one rank does not use what a branch of a module gives; None: all use all."""
        for model, of_rank in [(self.model, self.world.rank), *((one, r) for r, one in enumerate(self.twin.copies))]:
            if self.dropped is not None:
                module_at(model, self.dropped[0]).drops = False
            if path is not None and of_rank == rank:
                module_at(model, path).drops = True
        self.dropped = None if path is None else (path, rank)

    def sync(self, path: str, value: bool, recurse: bool = True) -> None:
        """set_requires_gradient_sync."""
        module_at(self.model, path).set_requires_gradient_sync(value, recurse=recurse)
        for unit in self.units:
            if unit == path or (recurse and (path == "" or unit.startswith(path + "."))):
                self.synced[unit] = value

    def reshard_after_forward(self, path: str, value: bool, recurse: bool) -> None:
        """The control of this name."""
        module_at(self.model, path).set_reshard_after_forward(value, recurse=recurse)

    def reshard_after_backward(self, path: str, value: bool, recurse: bool) -> None:
        """The control of this name."""
        module_at(self.model, path).set_reshard_after_backward(value, recurse=recurse)

    def forward_prefetch(self, path: str, others: Sequence[str]) -> None:
        """set_modules_to_forward_prefetch."""
        module_at(self.model, path).set_modules_to_forward_prefetch([module_at(self.model, one) for one in others])

    def backward_prefetch(self, path: str, others: Sequence[str]) -> None:
        """set_modules_to_backward_prefetch."""
        module_at(self.model, path).set_modules_to_backward_prefetch([module_at(self.model, one) for one in others])

    def divide(self, factor: float) -> None:
        """set_gradient_divide_factor."""
        self.model.set_gradient_divide_factor(factor)
        self.twin.factor = factor

    def unshard(self, path: str, asynchronous: bool) -> None:
        """unshard of one unit."""
        handle = module_at(self.model, path).unshard(async_op=asynchronous)
        if asynchronous:
            handle.wait()

    def reshard(self, path: str) -> None:
        """reshard of one unit."""
        module_at(self.model, path).reshard()

    def check_if_reduced(self) -> None:
        """check(), where no micro-batch waits."""
        if all(self.synced.values()) and not self.twin.waits():
            self.check()

    def check(self) -> None:
        """Compares all gradients, and which of them there are."""
        expected = self.twin.gradients()
        found = self._by_first_name(tessera.full_gradients(self.model))
        assert sorted(found) == sorted(expected), f"found gradients of {sorted(found)}, expected {sorted(expected)}"
        for name, value in expected.items():
            self._compare(f"gradient of {name}", found[name], value)
        used = self.twin.used()
        for name, shard in self.model.named_parameters():
            has = shard.grad is not None
            assert has == (name in used), f"gradient of {name}: found {'one' if has else 'none'}, expected the other"

    def clip(self, most: float) -> None:
        """Clips; the norm is summed in float64 in another order."""
        expected = self.twin.gradients()
        squares = sum((value.double().square().sum().item() for value in expected.values()), 0.0)
        norm = float(tessera.clip_grad_norm_(self.model, most))
        bound = 1e-5 if self.bound else 1e-6
        assert abs(norm - squares**0.5) <= bound * max(1.0, squares**0.5), f"found norm {norm}, expected {squares**0.5}"
        factor = min(1.0, most / (squares**0.5 + 1e-6))
        found = self._by_first_name(tessera.full_gradients(self.model))
        for name, value in expected.items():
            assert_close(f"clipped gradient of {name}", found[name], value * factor, bound)
        self.twin.follow_gradients(found)

    def step(self, kind: str) -> None:
        """A step of an optimizer on shards, compared with torch's on whole tensors; then the same values in both.

        With 16-bit shards tessera's keeps the rest of a float32 value, which the plain one steps.
        """
        narrow = {name for name, master in self.twin.masters.items() if master.dtype == BF16}
        if narrow and kind == "torch.adamw":
            kind = "torch.sgd"
        if self.optimizers is None or self.optimizers[0] != kind:
            self.optimizers = (kind, *self._make_optimizers(kind))
        _, sharded, plain, whole = self.optimizers
        expected = self.twin.gradients()
        for name, parameter in whole.items():
            if name not in narrow or kind.startswith("torch"):
                parameter.data = self.twin.masters[name].clone()
            if parameter.dtype == BF16:
                parameter.grad_dtype = F32
            parameter.grad = expected[name] if name in self.twin.used() else None
        plain.step()
        sharded.step()
        for name, value in self._by_first_name(tessera.full_parameters(self.model)).items():
            # Loops over parts of other lengths may fuse a product and a sum, or not; AdamW divides by roots.
            bound = (self.bound or 1e-6) * (10 if kind.endswith("adamw") else 1)
            if name in whole:
                assert_close(f"parameter {name}", value, whole[name], 2.0**-7 if name in narrow else bound)
            else:
                assert_bits(f"parameter {name}", value, self.twin.masters[name])
            self.twin.masters[name] = value.clone()

    def _make_optimizers(self, kind: str) -> tuple[Any, Any, dict[str, nn.Parameter]]:
        keeps = kind.startswith("tessera")
        trained = [(name, value) for name, value in self.twin.masters.items() if self.twin.trainable[name]]
        whole = {
            name: nn.Parameter(value.float() if keeps and value.dtype == BF16 else value.clone())
            for name, value in trained
        }
        make: Any = torch.optim.SGD if kind.endswith("sgd") else torch.optim.AdamW
        plain = make(whole.values(), lr=0.05, weight_decay=0.01)
        if keeps:
            of: Any = tessera.SGD if kind.endswith("sgd") else tessera.AdamW
            return of(self.model, lr=0.05, weight_decay=0.01), plain, whole
        own = [shard for shard in self.model.parameters() if shard.requires_grad]
        return make(own, lr=0.05, weight_decay=0.01), plain, whole

    def trainable(self, name: str, value: bool) -> None:
        """set_trainable of one parameter, between steps; optimizers are made again."""
        self.optimizers = None
        self.model.set_trainable(name, value)
        self.twin.trainable[self.twin.names[name]] = value

    def zero_grad(self) -> None:
        """zero_grad() of the model."""
        self.model.zero_grad()
        self.twin.zero_grad()

    def fail(self, path: str, *, rank: int | None, seed: int) -> None:
        """A forward in which the user's code raises, on one rank or on all; then all recover."""
        raises = rank is None or rank == self.world.rank
        module_at(self.model, path).fails = raises
        try:
            _, out = self._forward(self.model, seed, self.world.rank, False)
            first = next(one for one in pytree.tree_leaves(out) if isinstance(one, Tensor) and one.requires_grad)
            first.double().sum().backward()
        except ValueError as error:
            assert raises and "the user's" in str(error)
        except RuntimeError:
            assert not raises
        else:
            # A module that nothing calls.
            self.model.zero_grad()
        finally:
            module_at(self.model, path).fails = False
        self.world.recover()
        self.model.zero_grad()

    def end(self) -> None:
        """Compares this rank's buffers, and all parameters."""
        own = dict(self.twin.copies[self.world.rank].named_buffers())
        found = dict(self.model.named_buffers())
        assert list(found) == list(own)
        for name, value in own.items():
            self._compare(f"buffer {name}", found[name], value)
        for name, value in self._by_first_name(tessera.full_parameters(self.model)).items():
            assert_bits(f"parameter {name}", value, self.twin.masters[name])

    def _by_first_name(self, pairs: Sequence[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """A tied parameter has the name that it has in the unit that was sharded first."""
        return {self.twin.names[name]: value for name, value in pairs}

    def _compare(self, what: str, found: Tensor, expected: Tensor) -> None:
        if self.bound is None:
            assert_bits(what, found, expected)
        else:
            assert found.dtype == expected.dtype
            assert_close(what, found, expected, self.bound)

    def _compare_trees(self, what: str, found: Any, expected: Any) -> None:
        ours, shape = pytree.tree_flatten(found)
        theirs, other = pytree.tree_flatten(expected)
        assert shape == other, f"{what}: found {shape}, expected {other}"
        for one, two in zip(ours, theirs, strict=True):
            if isinstance(two, Tensor):
                assert one.requires_grad == two.requires_grad
                self._compare(what, one, two)
            else:
                assert one == two


def run(source: str, world: Any, shard: Callable[..., Any] = fully_shard) -> None:
    """Runs a program; AssertionError, or the error that it raises, where something differs. Collective."""
    program = Run(source, world, shard)
    program.names["train"](program)


__all__ = ["MixedPrecisionPolicy", "Rule", "cast_floating", "checkpoint", "run"]
