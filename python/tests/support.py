"""What the tests of the Python module compare a sharded model with: the unsharded one, on every rank for all ranks.

`Plain` is the model as it is, on plain autograd; `Unitwise` is the same with every dtype that a policy asks for,
a unit and a place at a time, as docs/numerics.md says it. Both add the ranks' gradients in rank order in the
dtype in which Tessera adds them, so with two ranks the bits have to be equal. Neither of them communicates.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tessera
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

FULL = os.environ.get("TESSERA_FULL") == "1"

LossOf = Callable[[Any, int], Tensor]


def drawn(*key: int, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns normal values of `shape` that are a function of `key` alone: the same on every rank."""
    generator = torch.Generator()
    seed = 17
    for part in key:
        seed = (seed * 1_000_003 + part) % (1 << 62)
    generator.manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)


def tokens(*key: int, shape: Sequence[int], below: int) -> Tensor:
    """Returns whole numbers of `shape` in [0, below), a function of `key`."""
    return drawn(*key, shape=shape, dtype=torch.float64).mul(1e4).long().remainder(below)


def accumulate_dtype(compute: torch.dtype) -> torch.dtype:
    """Returns the dtype in which gradients of a parameter that computes in `compute` are added by default."""
    return torch.promote_types(compute, torch.float32)


def mean_in_rank_order(gradients: Sequence[Tensor | None], factor: float, dtype: torch.dtype) -> Tensor | None:
    """Returns (g0 + g1 + ...) / factor, added in `dtype`, the quotient rounded once; None where no rank has one."""
    if all(gradient is None for gradient in gradients):
        return None
    total: Tensor | None = None
    for gradient in gradients:
        if gradient is None:
            continue
        widened = gradient.detach().to(dtype)
        total = widened if total is None else total + widened
    assert total is not None
    return (total.double() / factor).to(dtype)


def backward_of_all(copies: Sequence[nn.Module], loss_of: LossOf) -> list[Tensor]:
    """Calls `loss_of(copy, rank)` and its backward for every rank's copy. Returns the losses."""
    losses = []
    for rank, one in enumerate(copies):
        loss = loss_of(one, rank)
        loss.backward()
        losses.append(loss.detach())
    return losses


class Plain:
    """The unsharded model, one copy for each rank, each with the rank's batch.

    To be made before the model is sharded. Leaves in 16 bits have float32 gradients, so that micro-batches are
    added as Tessera adds them.
    """

    def __init__(self, model: nn.Module, size: int) -> None:
        self.copies = [copy.deepcopy(model) for _ in range(size)]
        self.factor: float = size
        for one in self.copies:
            for parameter in one.parameters():
                if parameter.is_floating_point() and parameter.itemsize < 4:
                    parameter.grad_dtype = torch.float32

    def backward(self, loss_of: LossOf) -> list[Tensor]:
        """Calls `loss_of(model, rank)` and its backward for every rank. Returns the losses."""
        return backward_of_all(self.copies, loss_of)

    def gradients(self) -> dict[str, Tensor]:
        """Returns the averages over the ranks by name; zeros for trainable parameters that no rank used."""
        parameters = [dict(one.named_parameters()) for one in self.copies]
        averages = {}
        for name, first in parameters[0].items():
            if not first.requires_grad:
                continue
            dtype = accumulate_dtype(first.dtype)
            mean = mean_in_rank_order([own[name].grad for own in parameters], self.factor, dtype)
            averages[name] = torch.zeros_like(first, dtype=dtype) if mean is None else mean
        return averages

    def step(self, optimizers: Sequence[torch.optim.Optimizer], used_only: bool = True) -> None:
        """Gives every copy the averaged gradients and steps it. One optimizer a copy."""
        averages = self.gradients()
        used = {name for one in self.copies for name, p in one.named_parameters() if p.grad is not None}
        for one, optimizer in zip(self.copies, optimizers, strict=True):
            for name, parameter in one.named_parameters():
                if name in averages and (name in used or not used_only):
                    parameter.grad = averages[name].clone()
            optimizer.step()

    def zero_grad(self) -> None:
        """Drops the gradients of all copies."""
        for one in self.copies:
            one.zero_grad()

    def parameters(self) -> dict[str, Tensor]:
        """Returns the first copy's parameters by name."""
        return {name: p.detach() for name, p in self.copies[0].named_parameters()}


class Unitwise:
    """The unsharded model as docs/numerics.md describes the sharded one.

    Each call of a unit computes with fresh leaves in the compute dtype, one for each place where a parameter is
    registered; what arrives at them is added, as it comes, in `accumulate`; a unit casts its floating inputs. What
    crosses its border has a node of its own. With `replicas` every rank has a whole copy: what micro-batches have left
    on a rank is added up there, and the ranks' sums are added again each time.

    `units` are the paths of the units, "" for the model, in the order in which they are sharded: places in one unit of
    a parameter that an earlier one has, too, keep one tensor between them, with a leaf for what each unit does with it.
    By a parameter's name, None for none: `compute` gives its compute dtype, `arrival` the dtype to which a raw gradient
    is rounded, `wire` that in which a rank's sum is sent. By a unit's path: `cast` gives the dtype to which it casts
    its inputs, `output` the same for its results.
    `owner` says which unit has a parameter, `names` gives the first name by any of it.
    """

    def __init__(
        self,
        model: nn.Module,
        size: int,
        *,
        units: Sequence[str] = ("",),
        compute: Callable[[str], torch.dtype | None] = lambda name: None,
        cast: Callable[[str], torch.dtype | None] = lambda unit: None,
        output: Callable[[str], torch.dtype | None] = lambda unit: None,
        wire: Callable[[str], torch.dtype | None] = lambda name: None,
        arrival: Callable[[str], torch.dtype | None] = lambda name: None,
        ignored: Iterable[str] = (),
        replicas: bool = False,
    ) -> None:
        self.replicas = replicas or size == 1
        self.copies = [copy.deepcopy(model) for _ in range(size)]
        self.factor: float = size
        self._wire, self._arrival = wire, arrival
        self._order = list(dict.fromkeys(units))
        self._units = sorted(self._order, key=len)
        self._compute, self._cast, self._output = compute, cast, output
        self.masters: dict[str, Tensor] = {}
        self.trainable: dict[str, bool] = {}
        self._slots: list[dict[str, Tensor]] = [{} for _ in range(size)]
        self._sums: dict[str, Tensor] = {}
        self._ignored = set(ignored)
        self._waiting: set[str] = set()
        self.owner: dict[str, str] = {}
        self.names: dict[str, str] = {}
        for rank, one in enumerate(self.copies):
            self._prepare(one, rank)

    def _unit_of(self, path: str) -> str:
        inside = [unit for unit in self._units if unit == "" or path == unit or path.startswith(unit + ".")]
        return inside[-1]

    def _ancestors(self, unit: str) -> list[str]:
        return [other for other in self._units if other == "" or unit == other or unit.startswith(other + ".")]

    def _ways_of(self, homes: set[str]) -> tuple[list[str], list[str]]:
        """Returns the units that have owned a parameter with places in `homes`, the last one last, and all whose calls
        give its shared tensor a gradient of their own: a parameter moves to the unit around all that have it."""
        owners: list[str] = []
        holders: list[str] = []
        for unit in self._order:
            inside = [other for other in holders if unit in self._ancestors(other)]
            here = unit in homes
            if (owners and owners[-1] in inside and (here or len(inside) > 1)) or (not owners and here):
                owners.append(unit)
            elif not here:
                continue
            holders.append(unit)
        return owners, holders

    def _prepare(self, model: nn.Module, rank: int) -> None:
        places: dict[int, list[tuple[nn.Module, str, str]]] = {}
        tensors: dict[int, Tensor] = {}
        for path, module in model.named_modules():
            for attribute, parameter in module._parameters.items():
                name = f"{path}.{attribute}" if path else attribute
                if parameter is None or name in self._ignored:
                    continue
                places.setdefault(id(parameter), []).append((module, attribute, name))
                tensors[id(parameter)] = parameter
        owned: dict[str, list[tuple[str, list[tuple[nn.Module, str]]]]] = {unit: [] for unit in self._units}
        for key, where in places.items():
            name = where[0][2]
            if rank == 0:
                self.masters[name] = tensors[key].detach().clone()
                self.trainable[name] = tensors[key].requires_grad
            homes = [self._unit_of(path.rpartition(".")[0]) for _, _, path in where]
            first = min(homes, key=self._order.index)
            owners, holders = self._ways_of(set(homes))
            self.owner[name] = owners[-1]
            self.names.update({path: name for _, _, path in where})
            at = [((module, attribute), home) for (module, attribute, _), home in zip(where, homes, strict=True)]
            of_first = [place for place, home in at if home == first]
            shared = [of_first[0], *(place for place, home in at if home != first)]
            for unit in holders:
                owned[unit].append((name, shared))
            for unit in owners:
                owned[unit] += [(name, [place]) for place in of_first[1:]]
        modules = dict(model.named_modules())
        for unit, own in owned.items():
            modules[unit].register_forward_pre_hook(self._entry_of(unit, own, rank), prepend=True, with_kwargs=True)
            modules[unit].register_forward_hook(self._exit_of(unit, own, rank))

    def _entry_of(self, unit: str, own: list[tuple[str, list[tuple[nn.Module, str]]]], rank: int) -> Callable[..., Any]:
        def enter(_module: nn.Module, arguments: Any, keywords: Any) -> Any:
            self._renew(own, rank)
            dtype = self._cast(unit)
            inputs = across_border((arguments, keywords))
            return inputs if dtype is None else cast_floating(inputs, dtype)

        return enter

    def _renew(self, own: list[tuple[str, list[tuple[nn.Module, str]]]], rank: int) -> None:
        """Puts a fresh leaf into the places of each parameter."""
        for name, where in own:
            leaf = self._leaf_of(name, rank)
            for module, attribute in where:
                module._parameters[attribute] = leaf

    def _exit_of(self, unit: str, own: list[tuple[str, list[tuple[nn.Module, str]]]], rank: int) -> Callable[..., Any]:
        shared = [(name, where) for name, where in own if self.owner[name] != unit]

        def leave(_module: nn.Module, _arguments: Any, result: Any) -> Any:
            self._renew(shared, rank)  # what the code around the unit does with them is no use by the unit
            dtype = self._output(unit)
            return across_border(result if dtype is None else cast_floating(result, dtype))

        return leave

    def _leaf_of(self, name: str, rank: int) -> nn.Parameter:
        master = self.masters[name]
        dtype = self._compute(name) or master.dtype
        leaf = nn.Parameter(master.to(dtype).clone(), requires_grad=self.trainable[name])
        if not self.trainable[name]:
            return leaf
        leaf.grad_dtype = None
        accumulate = accumulate_dtype(dtype)

        def arrive(parameter: Tensor) -> None:
            assert parameter.grad is not None
            raw = parameter.grad.to(self._arrival(name) or parameter.grad.dtype).to(accumulate)
            slot = self._slots[rank]
            slot[name] = slot[name] + raw if name in slot else raw.clone()
            self._waiting.add(name)
            parameter.grad = None

        leaf.register_post_accumulate_grad_hook(arrive)
        return leaf

    def backward(self, loss_of: LossOf) -> list[Tensor]:
        """Calls `loss_of(model, rank)` and its backward for every rank. Returns the losses."""
        return backward_of_all(self.copies, loss_of)

    def reduce(self, names: Iterable[str] | None = None) -> None:
        """Adds the ranks' slots, of all parameters or of `names`, to what was reduced before."""
        for name in list(self.masters if names is None else names):
            self._waiting.discard(name)
            take = dict.get if self.replicas else dict.pop
            parts: list[Tensor | None] = [take(slot, name, None) for slot in self._slots]
            if all(part is None for part in parts):
                continue
            total: Tensor | None = None
            for part in parts:
                if part is None:
                    continue
                wire = self._wire(name)
                sent = part if wire is None or len(parts) == 1 else part.to(wire).to(part.dtype)
                total = sent if total is None else total + sent
            assert total is not None
            before = None if self.replicas else self._sums.get(name)
            self._sums[name] = total if before is None else before + total

    def final_dtype(self, name: str) -> torch.dtype:
        """Returns the dtype in which the optimizer reads the gradient: that of the master."""
        return torch.promote_types(self.masters[name].dtype, torch.float32)

    def gradients(self) -> dict[str, Tensor]:
        """Returns what was reduced, averaged, in the final dtype; zeros where nothing arrived."""
        result = {}
        for name, master in self.masters.items():
            if not self.trainable[name]:
                continue
            final = self.final_dtype(name)
            total = self._sums.get(name)
            result[name] = (
                torch.zeros_like(master, dtype=final) if total is None else (total.double() / self.factor).to(final)
            )
        return result

    def waits(self) -> bool:
        """Returns whether something has arrived that was not reduced."""
        return bool(self._waiting)

    def follow_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Takes these averages for what was reduced."""
        for name in self._sums:
            self._sums[name] = gradients[name].to(self._sums[name].dtype) * self.factor

    def used(self) -> set[str]:
        """Returns the names of the parameters that have a reduced gradient."""
        return set(self._sums)

    def zero_grad(self) -> None:
        """Drops what was reduced; what waits in the slots stays."""
        self._sums.clear()
        for slot in self._slots:
            for name in [name for name in slot if name not in self._waiting]:
                del slot[name]


def across_border(tree: Any) -> Any:
    """Returns `tree` with clones of the tensors that require grad.

    At a unit's border each has a node of its own, so gradients of its uses inside are added before those outside.
    """
    return pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) and x.requires_grad else x, tree)


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """Returns `tree` with its floating tensors in `dtype`."""
    return pytree.tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, tree)


def assert_bits(what: str, found: Tensor, expected: Tensor) -> None:
    """Fails unless both have the same dtype, shape and values."""
    assert found.dtype == expected.dtype, f"{what}: found {found.dtype}, expected {expected.dtype}"
    assert found.shape == expected.shape, f"{what}: found {tuple(found.shape)}, expected {tuple(expected.shape)}"
    if not torch.equal(found.detach(), expected.detach()):
        error = (found.detach().double() - expected.detach().double()).abs().max().item()
        largest = expected.detach().double().abs().max().item()
        raise AssertionError(
            f"{what}: found values up to {error:.3g} off, expected the same bits; largest {largest:.3g}"
        )


def assert_close(what: str, found: Tensor, expected: Tensor, bound: float) -> None:
    """Fails unless values are within `bound` of the largest one expected (1 at least)."""
    assert found.shape == expected.shape, f"{what}: found {tuple(found.shape)}, expected {tuple(expected.shape)}"
    if found.numel() == 0:
        return
    error = (found.detach().double() - expected.detach().double()).abs().max().item()
    largest = max(1.0, expected.detach().double().abs().max().item())
    most = bound * largest
    assert error <= most, f"{what}: found values up to {error:.3g} off, expected at most {most:.3g}"


def assert_same(
    what: str, found: Iterable[tuple[str, Tensor]], expected: Mapping[str, Tensor], bound: float | None = None
) -> None:
    """Fails unless both have the same names and values: the same bits, or within `bound`."""
    found = dict(found)
    assert sorted(found) == sorted(expected), f"{what}: found {sorted(found)}, expected {sorted(expected)}"
    for name, value in expected.items():
        if bound is None:
            assert_bits(f"{what} of {name}", found[name], value)
        else:
            assert_close(f"{what} of {name}", found[name], value, bound)


def assert_same_gradients(model: nn.Module, plain: Plain | Unitwise, bound: float | None = None) -> None:
    """Compares the whole gradients of a sharded model with those of the plain one. Collective."""
    assert_same("gradient", tessera.full_gradients(model), plain.gradients(), bound)


def assert_same_parameters(model: nn.Module, plain: Plain, bound: float | None = None) -> None:
    """Compares the whole parameters. Collective."""
    assert_same("parameter", tessera.full_parameters(model), plain.parameters(), bound)


def shard_layers(model: nn.Module, paths: Sequence[str], **options: Any) -> nn.Module:
    """Makes a unit of each module in `paths`, in this order, then of the model. Returns the model."""
    for path in paths:
        tessera.fully_shard(model.get_submodule(path), **options)
    tessera.fully_shard(model, **options)
    return model


class Mlp(nn.Module):
    """Three linear layers with tanh after each."""

    def __init__(self, width: int = 8, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns [..., width]."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


MLP_UNITS = ("layers.0", "layers.1", "layers.2")


class Block(nn.Module):
    """Two linear layers and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 8] to [rows, 8]."""
        return x + self.second(torch.tanh(self.first(x)))


class Tower(nn.Module):
    """Two blocks, then a scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 8] to [rows, 8]."""
        for block in self.blocks:
            x = block(x)
        return x * self.scale


CUTS: dict[str, tuple[str, ...]] = {
    "one": (),
    "blocks": ("blocks.0", "blocks.1"),
    "nested": ("blocks.0.first", "blocks.0", "blocks.1.first", "blocks.1.second", "blocks.1"),
    "one of them": ("blocks.1.second",),
}


def mse(model: Any, rank: int, step: int = 0, width: int = 8) -> Tensor:
    """Returns the loss of a rank's batch of a step."""
    x = drawn(1, step, rank, shape=(4, width))
    return nn.functional.mse_loss(model(x).float(), drawn(2, step, rank, shape=(4, width)))


def assert_steps_as_plain(
    world: Any, model: nn.Module, plain: Plain, loss_of: Callable[[Any, int, int], Tensor], steps: int = 2
) -> None:
    """Runs `steps` forwards, backwards and SGD steps of both, and compares losses, gradients, parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in plain.copies]
    for step in range(steps):
        loss = loss_of(model, world.rank, step)
        loss.backward()
        losses = plain.backward(lambda one, rank, at=step: loss_of(one, rank, at))
        assert_bits("loss", loss, losses[world.rank])
        assert_same_gradients(model, plain)
        optimizer.step()
        plain.step(optimizers)
        optimizer.zero_grad()
        plain.zero_grad()
        assert_same_parameters(model, plain)
