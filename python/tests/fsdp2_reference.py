"""A model and its sharded twin over the same batches, for the cases of PyTorch's FSDP2 (docs/python_fsdp2.md).

Upstream compares with DistributedDataParallel, or all-reduces the gradients of a plain copy, within tolerances. Here
every rank computes the batches of all ranks on its plain copy and adds in rank order, so bits are compared and a test
needs no process group. `Unitwise` of support.py is the reference where units have rules; this one steps, too.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tessera
import torch
from support import assert_bits, drawn, tokens
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

BFLOAT16 = torch.bfloat16
FLOAT16 = torch.float16
FLOAT32 = torch.float32

def sum_of(model: nn.Module, batch: Any) -> Tensor:
    """Returns the sum of the model's result on `batch`, upstream's usual loss."""
    return model(batch).sum()


def every(name: str) -> bool:
    """Says yes to every parameter."""
    return True


def as_plain(pairs: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Returns whole tensors by the names of the module without torch's checkpoint wrappers around its layers."""
    return {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in pairs}


def adam(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Returns torch's Adam: elementwise, so steps of slices have the bits of a step of the whole."""
    return torch.optim.Adam(parameters, lr=1e-2)


def shard_children(model: nn.Module, **options: Any) -> None:
    """Makes a unit of each child with parameters, then of the model."""
    for child in model.children():
        tessera.fully_shard(child, **options)
    tessera.fully_shard(model, **options)


class Alike:
    """Trains a plain copy and the sharded model alike, and compares bits.

    `shard` turns `model` into the sharded one. `compute` is the dtype in which the plain copy computes, with masters as
    they are. `wire` is the dtype to which a rank's part is rounded before it is added. `replicas` > 1: ranks are added
    in groups of size / replicas, then the groups.
    """

    def __init__(
        self,
        world: tessera.World,
        model: nn.Module,
        shard: Callable[[nn.Module], Any],
        *,
        loss: Callable[[nn.Module, Any], Tensor] = sum_of,
        optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = adam,
        compute: torch.dtype | None = None,
        wire: torch.dtype | None = None,
        replicas: int = 1,
    ) -> None:
        self.rank, self.size = world.rank, world.size
        self.plain = copy.deepcopy(model)
        self.sharded = model
        self._loss, self._wire, self._replicas = loss, wire, replicas
        self._compute = self.plain if compute is None else copy.deepcopy(self.plain).to(compute)
        self._slots: list[dict[str, Tensor]] = [{} for _ in range(self.size)]
        self._partials: dict[str, list[Tensor]] = {}
        self._sums: dict[str, Tensor] = {}
        self.factor: float = self.size
        shard(model)
        self._make_optimizer = optimizer
        self.make_optimizers()

    def make_optimizers(self) -> None:
        """Begins with new optimizers on both, as one of torch.optim has to after set_trainable()."""
        self.plain_optimizer = self._make_optimizer(self.plain.parameters())
        self.optimizer = self._make_optimizer(self.sharded.parameters())

    def plain_losses(self, batch_of: Callable[[int], Any], loss: Callable[[nn.Module, Any], Tensor]) -> list[Tensor]:
        """Runs the batches of all ranks on the plain copy. Gradients go to the ranks' slots."""
        losses = []
        for rank in range(self.size):
            self._compute.zero_grad(set_to_none=True)
            value = loss(self._compute, batch_of(rank))
            if value.requires_grad:
                value.backward()
            losses.append(value.detach())
            slot = self._slots[rank]
            for name, parameter in self._compute.named_parameters():
                if parameter.grad is None:
                    continue
                raw = parameter.grad.to(torch.promote_types(parameter.dtype, FLOAT32))
                slot[name] = slot[name] + raw if name in slot else raw.clone()
        self._compute.zero_grad(set_to_none=True)
        return losses

    def backward(
        self,
        batch_of: Callable[[int], Any],
        *,
        loss: Callable[[nn.Module, Any], Tensor] | None = None,
        reduced: Callable[[str], bool] = every,
        replicas_too: bool = True,
        between: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Runs one micro-batch forward and backward on both, compares this rank's losses, and returns the loss.

        `reduced` says which parameters' gradients are added over ranks now, `replicas_too` whether over replicas.
        `between` runs between forward and backward of the sharded model.
        """
        loss = loss or self._loss
        expected = self.plain_losses(batch_of, loss)[self.rank]
        found = loss(self.sharded, batch_of(self.rank))
        between()
        if found.requires_grad:
            found.backward()
        self.reduce(reduced, replicas_too)
        assert_bits("loss", found.detach(), expected)
        return found.detach()

    def reduce(self, reduced: Callable[[str], bool] = every, replicas_too: bool = True) -> None:
        """Adds over ranks what waits in the plain copy's slots."""
        shards = self.size // self._replicas
        for name in {name for slot in self._slots for name in slot if reduced(name)}:
            parts = [slot.pop(name, None) for slot in self._slots]
            groups = [self._sum(parts[at : at + shards]) for at in range(0, self.size, shards)]
            held = self._partials.get(name)
            self._partials[name] = groups if held is None else [a + b for a, b in zip(held, groups, strict=True)]
        if not replicas_too:
            return
        for name in [name for name in self._partials if reduced(name)]:
            # A shard keeps what its replica has; each sum over replicas begins with all of that.
            partials = self._partials[name]
            self._sums[name] = (self._sum(partials) if len(partials) > 1 else partials[0]) / self.factor

    def _sum(self, parts: list[Tensor | None]) -> Tensor:
        present = [part for part in parts if part is not None]
        if self._wire is not None:
            present = [part.to(self._wire).to(part.dtype) for part in present]
        total = present[0]
        for part in present[1:]:
            total = total + part
        return total

    def compare_gradients(self) -> None:
        """Compares whole gradients: the same names, dtypes and bits, zeros where nothing arrived. Collective."""
        found = as_plain(tessera.full_gradients(self.sharded))
        trained = {name: p for name, p in self.plain.named_parameters() if p.requires_grad}
        assert sorted(found) == sorted(trained)
        for name, parameter in trained.items():
            dtype = torch.promote_types(parameter.dtype, FLOAT32)
            expected = self._sums.get(name, torch.zeros_like(parameter, dtype=dtype)).to(dtype)
            assert_bits(f"gradient of {name}", found[name], expected)

    def compare_parameters(self) -> None:
        """Compares whole parameters: the same names, dtypes and bits. Collective."""
        found = as_plain(tessera.full_parameters(self.sharded))
        plain = dict(self.plain.named_parameters())
        assert sorted(found) == sorted(plain)
        for name, parameter in plain.items():
            assert_bits(f"parameter {name}", found[name], parameter.detach())

    def step(self, set_to_none: bool = True) -> None:
        """Compares gradients, steps both optimizers, clears gradients and compares parameters. Collective."""
        self.compare_gradients()
        for name, parameter in self.plain.named_parameters():
            parameter.grad = self._sums[name].to(parameter.dtype) if name in self._sums else None
        self.plain_optimizer.step()
        self.optimizer.step()
        self.plain_optimizer.zero_grad(set_to_none=True)
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self._partials.clear()
        if set_to_none:
            self._sums.clear()
        else:
            self._sums = {name: torch.zeros_like(value) for name, value in self._sums.items()}
        if self._compute is not self.plain:
            with torch.no_grad():
                for own, master in zip(self._compute.parameters(), self.plain.parameters(), strict=True):
                    own.copy_(master)
        self.compare_parameters()

    def clear(self) -> None:
        """Drops the gradients of both without a step."""
        self.optimizer.zero_grad()
        self._partials.clear()
        self._sums.clear()

    def train(self, batch_of: Callable[[int, int], Any], steps: int = 3) -> None:
        """Steps `steps` times on `batch_of(step, rank)`, clearing to none and to zeros in turn."""
        for step in range(steps):
            self.backward(lambda rank, step=step: batch_of(step, rank))
            self.step(set_to_none=step % 2 == 0)


class Mlp(nn.Module):
    """Two linear layers with a relu after each."""

    def __init__(self, width: int, factor: int = 4) -> None:
        super().__init__()
        self.in_proj = nn.Linear(width, factor * width)
        self.out_proj = nn.Linear(factor * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [..., width]."""
        return functional.relu(self.out_proj(functional.relu(self.in_proj(x))))


def mlps(width: int = 8, count: int = 3, seed: int = 42) -> nn.Sequential:
    """Returns `count` Mlps one after the other."""
    torch.manual_seed(seed)
    return nn.Sequential(*[Mlp(width) for _ in range(count)])


class Attention(nn.Module):
    """Causal attention of two heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [batch, length, width]."""
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        scores = parts[0] @ parts[1].transpose(-1, -2) / (width / 2) ** 0.5
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(mask, float("-inf")).softmax(-1) @ parts[2]
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A layer of the transformer: attention and an Mlp, each after a norm and added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_forward = Mlp(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [batch, length, width]."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_norm(x))


VOCABULARY = 31


class Transformer(nn.Module):
    """A small language model; `checkpointed`: layers run under torch's non-reentrant checkpoint."""

    def __init__(self, layers: int = 2, *, tied: bool = False, checkpointed: bool = False, width: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(16, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.output.weight = self.tokens.weight
        self.checkpointed = checkpointed

    def forward(self, ids: Tensor) -> Tensor:
        """Returns logits, [batch, length, VOCABULARY]."""
        h = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=False) if self.checkpointed else layer(h)
        return self.output(self.norm(h))


def transformer(layers: int = 2, *, tied: bool = False, checkpointed: bool = False) -> Transformer:
    """Returns the same model on every rank."""
    torch.manual_seed(42)
    return Transformer(layers, tied=tied, checkpointed=checkpointed)


def shard_layers_of(model: Transformer, **options: Any) -> None:
    """Makes a unit of each layer, then of the model, which keeps embeddings, norm and output."""
    for layer in model.layers:
        tessera.fully_shard(layer, **options)
    tessera.fully_shard(model, **options)


class ChunkedHead(nn.Module):
    """A model whose head may be left out of its forward, to be called by itself on chunks of the hidden states."""

    def __init__(self, width: int = 8, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.body = nn.Linear(width, width, bias=False)
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, *, skip_head: bool = False) -> Tensor:
        """Returns logits, or with `skip_head` the normed hidden states."""
        h = self.norm(self.body(self.embed(ids)))
        return h if skip_head else self.head(h)


def units_of(model: nn.Module) -> Iterator[tessera.FSDPModule]:
    """Yields every unit of the tree, parents first."""
    for module in model.modules():
        if isinstance(module, tessera.FSDPModule):
            yield module


def ids_of(step: int, rank: int, length: int = 6) -> Tensor:
    """Returns token ids [2, length]."""
    return tokens(7, step, rank, shape=(2, length), below=VOCABULARY)


def rows_of(width: int, rows: int = 4) -> Callable[[int, int], Tensor]:
    """Returns the batches [rows, width] of a step and a rank."""
    return lambda step, rank: drawn(5, step, rank, shape=(rows, width))


def shard_tail(model: nn.Sequential, **options: Any) -> None:
    """Makes a unit of each Mlp, then of the model, which keeps the first linear layer."""
    for mlp in itertools.islice(model, 1, None):
        tessera.fully_shard(mlp, **options)
    tessera.fully_shard(model, **options)


def accumulate(
    alike: Alike, mode: str, reshard_after_backward: bool, replicas_wait: bool = False, steps: int = 2
) -> None:
    """Steps on three micro-batches, of which `mode` leaves the first two without sync in some units.

    `replicas_wait`: they are added over the shard ranks, and only the sum over replicas waits.
    """
    model = alike.sharded
    owner = {"all": lambda name: True, "root_only": lambda name: name.startswith("0.")}
    waits = owner.get(mode, lambda name: name.startswith(("1.", "2.")))
    targets = list(itertools.islice(model, 1, 3)) if mode == "some_mlps" else [model]
    for step in range(steps):
        for micro in range(3):
            last = micro == 2
            for module in targets:
                recurse = mode != "root_only"
                if replicas_wait:
                    module.set_requires_all_reduce(last)
                else:
                    module.set_requires_gradient_sync(last, recurse=recurse)
                if not reshard_after_backward:
                    module.set_reshard_after_backward(last, recurse=recurse)
            alike.backward(
                lambda rank, step=step, micro=micro: drawn(step, micro, rank, shape=(2, 8)),
                reduced=lambda name, last=last: last or replicas_wait or not waits(name),
                replicas_too=last or not replicas_wait,
            )
        alike.step(set_to_none=step % 2 == 1)


CHECKPOINTS = ("composable", "utils", "wrapper")


def checkpoint_layers(model: Transformer, way: str) -> None:
    """Puts every layer under torch's checkpoint: by its composable function, in the forward, or by a wrapper."""
    if way == "composable":
        for layer in model.layers:
            composable_checkpoint(layer)
    elif way == "wrapper":
        layers = set(model.layers)
        apply_activation_checkpointing(model, check_fn=lambda module: module in layers)
    else:
        model.checkpointed = True
