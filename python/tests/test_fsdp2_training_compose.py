"""The cases of PyTorch's test_fully_shard_training.py about checkpoints, partial groups and double forwards.

As test_fsdp2_training.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import tessera
import torch
from fsdp2_reference import (
    CHECKPOINTS,
    VOCABULARY,
    Alike,
    ChunkedHead,
    Transformer,
    checkpoint_layers,
    ids_of,
    shard_children,
    shard_layers_of,
    transformer,
)
from support import drawn
from torch import Tensor, nn


class TestTrainingCompose:
    """Upstream: TestFullyShard1DTrainingCompose."""

    @pytest.mark.parametrize("grouping", ["block", "unshard_in_backward", "tied"])
    @pytest.mark.parametrize("way", CHECKPOINTS)
    @pytest.mark.parametrize("reshard_after_forward", [True, False])
    def test_train_parity_with_activation_checkpointing(
        self, world: tessera.World, reshard_after_forward: bool, way: str, grouping: str
    ) -> None:
        """Checkpointed units train as the plain model without checkpoints, also with an embedding of its own."""

        def shard(model: Transformer) -> None:
            checkpoint_layers(model, way)
            if grouping == "unshard_in_backward":
                for embedding in (model.tokens, model.positions):
                    tessera.fully_shard(embedding, reshard_after_forward=reshard_after_forward)
                    embedding.set_unshard_in_backward(False)
            shard_layers_of(model, reshard_after_forward=reshard_after_forward)

        alike = Alike(world, transformer(tied=grouping == "tied"), shard)
        alike.train(ids_of, steps=2)

    def _chunked(self, alike: Alike, step: int, chunks: int = 4) -> None:
        """Runs a model without its head, then the head on detached chunks, then the model's backward, on both."""

        def run(model: nn.Module, ids: Tensor) -> None:
            h = model(ids, skip_head=True)
            slopes = []
            for chunk in torch.chunk(h.detach().float(), chunks, dim=1):
                own = chunk.contiguous().detach().requires_grad_(True)
                model.head(own).sum().backward()
                assert own.grad is not None
                slopes.append(own.grad)
            h.backward(torch.cat(slopes, dim=1).to(h.dtype))

        for rank in range(alike.size):
            alike.plain.zero_grad()
            run(alike.plain, ids_of(step, rank, 8))
            alike._slots[rank] = {
                name: one.grad.clone() for name, one in alike.plain.named_parameters() if one.grad is not None
            }
        alike.plain.zero_grad()
        run(alike.sharded, ids_of(step, alike.rank, 8))

    @staticmethod
    def _shard_chunked(model: ChunkedHead, **options: Any) -> None:
        for module in (model.embed, model.body, model.norm, model.head):
            tessera.fully_shard(module, **options)
        tessera.fully_shard(model)

    @pytest.mark.parametrize("reshard_after_forward", [True, False])
    def test_partial_group_forward_then_standalone(self, world: tessera.World, reshard_after_forward: bool) -> None:
        """A head that the model's forward leaves out and that is called on chunks, each with its backward: four uses.

        A list of modules is refused by name, so norm and head are units of their own, upstream's ungrouped side.
        """
        torch.manual_seed(42)
        with pytest.raises(tessera.Error, match=r"one torch\.nn\.Module"):
            tessera.fully_shard([nn.Linear(2, 2), nn.Linear(2, 2)])  # type: ignore[arg-type]
        alike = Alike(
            world,
            ChunkedHead(),
            lambda model: self._shard_chunked(model, reshard_after_forward=reshard_after_forward),
        )
        for step in range(2):
            self._chunked(alike, step)
            # The head was reduced after every chunk, so a rank's chunks are not added before ranks are.
            head = alike._slots[0].pop("head.weight"), *(slot.pop("head.weight") for slot in alike._slots[1:])
            alike.reduce()
            found = dict(tessera.full_gradients(alike.sharded))
            expected = sum(one.double() for one in head) / alike.size
            bound = 8 * torch.finfo(torch.float32).eps * sum(one.double().abs() for one in head).max()
            assert (found["head.weight"].double() - expected).abs().max() <= bound
            alike._sums["head.weight"] = found["head.weight"]
            alike.step(set_to_none=step % 2 == 0)

    @pytest.mark.parametrize("whole", [True, False])
    def test_partial_group_forward_casts_outputs(self, world: tessera.World, whole: bool) -> None:
        """`output_dtype` of a unit holds where it is called, in the model's forward or by itself."""
        torch.manual_seed(42)
        model = ChunkedHead()
        narrow = tessera.MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.bfloat16)
        wide = tessera.MixedPrecisionPolicy(param_dtype=torch.float32)
        for module in (model.norm, model.head):
            tessera.fully_shard(module, mp_policy=narrow)
        tessera.fully_shard(model, mp_policy=narrow if whole else wide)
        h = model(ids_of(0, world.rank), skip_head=True)
        assert h.dtype == torch.bfloat16
        assert model.head(h.detach().float()).dtype == torch.bfloat16
        assert model(ids_of(0, world.rank)).dtype == torch.bfloat16

    def test_grouped_module_cast_forward_inputs(self, world: tessera.World) -> None:
        """Each unit casts its own inputs, so a float32 intermediate between two bfloat16 units is no error."""

        class Between(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a = nn.Linear(8, 8, bias=False)
                self.b = nn.Linear(8, 8, bias=False)

            def forward(self, x: Tensor) -> Tensor:
                return self.b(self.a(x).float())

        torch.manual_seed(42)
        model = Between()
        shard_children(model, mp_policy=tessera.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        out = model(drawn(1, world.rank, shape=(2, 8)))
        assert out.dtype == torch.bfloat16
        out.sum().backward()
        for name, gradient in tessera.full_gradients(model):
            assert gradient.count_nonzero() > 0, name

    @pytest.mark.parametrize("reshard_after_forward", [True, False])
    def test_partial_group_forward_grad_accum_chunked(
        self, world: tessera.World, reshard_after_forward: bool
    ) -> None:
        """Chunks and micro-batches without sync until the last backward add as on the plain model.

        The first backward of the last micro-batch, a chunk's, reduces all that waits, so sums over ranks are formed in
        another order than the plain ones: the bound is that of fp32's additions, of which there are 6 at most.
        """
        torch.manual_seed(42)
        alike = Alike(
            world,
            ChunkedHead(),
            lambda model: self._shard_chunked(model, reshard_after_forward=reshard_after_forward),
        )
        slots: list[dict[str, Tensor]] = [{} for _ in range(world.size)]
        for micro in range(3):
            last = micro == 2
            alike.sharded.set_requires_gradient_sync(last)
            alike.sharded.set_is_last_backward(last)
            self._chunked(alike, micro, chunks=2)
            for rank in range(world.size):
                for name, value in alike._slots[rank].items():
                    slots[rank][name] = slots[rank][name] + value if name in slots[rank] else value
        found = dict(tessera.full_gradients(alike.sharded))
        eps = torch.finfo(torch.float32).eps
        for name in slots[0]:
            parts = [slot[name].double() for slot in slots]
            bound = 6 * eps * sum(part.abs() for part in parts).max()
            expected = (sum(slot[name] for slot in slots) / world.size).double()
            assert (found[name].double() - expected).abs().max() <= bound, name

    @pytest.mark.parametrize("tied", [False, True])
    def test_partial_group_reshard_toggle(self, world: tessera.World, tied: bool) -> None:
        """A head that stays gathered over its chunks and is freed by reshard().

        Upstream switches `reshard_after_forward` between the model's forward and its backward: refused here by name,
        so it is set before.
        """
        torch.manual_seed(42)
        model = ChunkedHead(tied=tied)
        for module in (model.body, model.head):
            tessera.fully_shard(module, reshard_after_forward=module is not model.head)
        tessera.fully_shard(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        model.head.set_reshard_after_backward(False)
        for step in range(2):
            h = model(ids_of(step, world.rank, 8), skip_head=True)
            with pytest.raises(tessera.Error, match="set_reshard_after_forward"):
                model.head.set_reshard_after_forward(True)
            slopes = []
            for chunk in torch.chunk(h.detach(), 4, dim=1):
                own = chunk.contiguous().detach().requires_grad_(True)
                model.head(own).sum().backward()
                assert own.grad is not None
                slopes.append(own.grad)
                if not tied:
                    assert model.head.weight.shape == (VOCABULARY, 8)
                    assert model.head.weight.detach().clone().isfinite().all()
            model.head.reshard()
            if not tied:
                with pytest.raises(RuntimeError, match="head"):
                    model.head.weight.detach().clone()
            h.backward(torch.cat(slopes, dim=1))
            for name, gradient in tessera.full_gradients(model):
                assert gradient.count_nonzero() > 0, name
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)

    def test_reset_iter_state_after_exception(self, world: tessera.World) -> None:
        """After an exception inside a forward, recover() on all ranks, and the next step has the plain gradients."""

        class Raises(nn.Module):
            def __init__(self, wrapped: nn.Module) -> None:
                super().__init__()
                self.wrapped = wrapped
                self.armed = False

            def forward(self, x: Tensor) -> Tensor:
                if self.armed:
                    raise RuntimeError("armed")
                return self.wrapped(x)

        torch.manual_seed(42)
        model = ChunkedHead()
        model.body = Raises(model.body)

        def shard(module: ChunkedHead) -> None:
            for one in (module.norm, module.head):
                tessera.fully_shard(one)
            tessera.fully_shard(module)

        alike = Alike(world, model, shard)
        alike.sharded.body.armed = True
        with pytest.raises(RuntimeError, match="armed"):
            alike.sharded(ids_of(0, world.rank), skip_head=True)
        alike.sharded.body.armed = False
        world.recover()
        alike.train(ids_of, steps=1)

    @pytest.mark.parametrize("way", ["composable", "utils"])
    @pytest.mark.parametrize("reshard_after_forward", [True, False])
    def test_double_forward_with_nested_fsdp_and_checkpoint(
        self, world: tessera.World, reshard_after_forward: bool, way: str
    ) -> None:
        """Two forwards before one backward through units inside of checkpointed units have the plain gradients."""

        def shard(model: Transformer) -> None:
            checkpoint_layers(model, way)
            for layer in model.layers:
                for inner in (layer.attention, layer.feed_forward):
                    tessera.fully_shard(inner, reshard_after_forward=reshard_after_forward)
            shard_layers_of(model, reshard_after_forward=reshard_after_forward)

        def difference(model: nn.Module, batches: tuple[Tensor, Tensor]) -> Tensor:
            one, other = (model(batch) for batch in batches)
            return (one.sum() - other.sum()).pow(2)

        alike = Alike(world, transformer(), shard, loss=difference)
        alike.backward(lambda rank: (ids_of(0, rank), ids_of(1, rank)))
        alike.step()

    def test_double_partial_forward_then_backward(self, world: tessera.World) -> None:
        """Two forwards that leave a unit out, then one backward: the rest has its gradient, the head has none."""

        def both(model: nn.Module, batches: tuple[Tensor, Tensor]) -> Tensor:
            return model(batches[0], skip_head=True).sum() + model(batches[1], skip_head=True).sum()

        def shard(model: ChunkedHead) -> None:
            for module in (model.norm, model.head):
                tessera.fully_shard(module)
            tessera.fully_shard(model)

        torch.manual_seed(42)
        alike = Alike(world, ChunkedHead(), shard, loss=both)
        alike.backward(lambda rank: (ids_of(0, rank), ids_of(1, rank)))
        assert all(one.grad is None for one in alike.sharded.head.parameters())
        alike.step()
