"""What is refused, by name and with the way: every act of the table (refusals.py).

Every refusal comes on every rank, and the next model trains as if nothing had been.
"""

from __future__ import annotations

import dataclasses
import gc
import re
from typing import Any

import pytest
import tessera
import torch
from refusals import REFUSALS, UNITS, a_reentrant_checkpoint_around_a_unit, loss_of, sharded, without_collector
from support import Mlp, Plain, assert_same_gradients, drawn, shard_layers
from tessera import fully_shard
from torch import Tensor


@pytest.mark.fails_world
@pytest.mark.parametrize("name", REFUSALS)
def test_it_is_refused_by_name_and_the_next_model_trains(world: Any, name: str) -> None:
    """The table, on every rank; then a plain step of another model has the plain gradients."""
    case = REFUSALS[name]
    if world.size == 1 and name in ("reading_a_weight_outside_of_a_forward", "an_inner_modules_forward_past_its_unit"):
        pytest.skip("one rank keeps its values where they are")
    with pytest.raises(case.error) as caught:
        case.act()
    text = " ".join(str(caught.value).split())
    assert re.search(case.text, text), f"found the text {text!r}, expected {case.text!r}"
    if isinstance(caught.value, tessera.Error):
        assert caught.value.kind in ("usage", "contract", "config")
    caught = None  # type: ignore[assignment]  # a traceback holds frames, and those a graph
    if case.lasting:
        world.recover()
    model = Mlp()
    plain = Plain(model, world.size)
    shard_layers(model, UNITS)
    loss_of(model, world.rank).backward()
    plain.backward(loss_of)
    assert_same_gradients(model, plain)


@pytest.mark.fails_world
def test_ranks_with_different_controls_are_told_which(world: Any) -> None:
    """set_requires_gradient_sync(False) on one rank: an error at the next collective, with both ranks' values."""
    if world.size == 1:
        pytest.skip("one rank agrees with itself")
    model = sharded()
    model.set_requires_gradient_sync(world.rank == 0)
    with pytest.raises(RuntimeError, match="requires_gradient_sync"):
        loss_of(model).backward()
    world.recover()


@pytest.mark.fails_world
def test_what_an_error_has_left_ends_on_one_rank_alone(world: Any) -> None:
    """After recover() a rank may collect the units of the failed step when it likes: it waits for no other one."""
    gc.collect()
    with without_collector():
        with pytest.raises(RuntimeError):
            a_reentrant_checkpoint_around_a_unit()  # an error in a backward, whose frames and graph are a cycle
        world.recover()
        if world.rank == 0:
            gc.collect()
        world.barrier()
    gc.collect()


def test_a_backward_with_other_inputs_leaves_shards_alone(world: Any) -> None:
    """inputs= names tensors outside of the model: those have gradients, shards have none."""
    model = sharded()
    x = drawn(1, shape=(4, 8)).requires_grad_()
    model(x).square().mean().backward(inputs=[x])
    assert x.grad is not None
    assert all(shard.grad is None for shard in model.parameters())


@pytest.mark.parametrize("keeps", ["float", "cpu", "type", "to", "to number 0"])
def test_a_conversion_that_changes_nothing(world: Any, keeps: str) -> None:
    """Is none: the shards stay as they are."""
    model = sharded()
    before = list(model.parameters())
    act = {
        "float": model.float,
        "cpu": model.cpu,
        "type": lambda: model.type(torch.float32),
        "to": lambda: model.to("cpu", torch.float32),
        "to number 0": lambda: model.to("cpu:0"),
    }
    assert act[keeps]() is model
    assert all(after is shard for after, shard in zip(model.parameters(), before, strict=True))


def test_a_mesh_with_other_axes_is_refused(world: Any) -> None:
    """A DeviceMesh with a dim named tp, or one of three dims."""

    @dataclasses.dataclass
    class FakeMesh:
        mesh: Tensor
        mesh_dim_names: tuple[str, ...] | None

        @property
        def ndim(self) -> int:
            return self.mesh.ndim

    for names, text in (
        (("dp_shard", "tp"), "'tp'"),
        (("pp",), "'pp'"),
        (("dp_shard", "dp_replicate"), "before dp_shard"),
    ):
        shape = (world.size,) if len(names) == 1 else (1, world.size)
        with pytest.raises(tessera.Error, match=text):
            fully_shard(Mlp(), mesh=FakeMesh(torch.arange(world.size).view(shape), names))  # type: ignore[arg-type]
    with pytest.raises(tessera.Error, match="one dim .* or two"):
        fully_shard(Mlp(), mesh=FakeMesh(torch.arange(world.size).view(1, 1, -1), None))  # type: ignore[arg-type]
