"""The World, and meshes over it: what init() joins, what collectives give, which meshes are taken and refused."""

from __future__ import annotations

import copy
import datetime
import os
import pickle
import sys
import threading
import time

import pytest
import tessera
import torch
import torch.distributed as dist
from tessera import _C, _world
from torch import nn
from torch.distributed.device_mesh import DeviceMesh


@pytest.fixture(scope="module")
def group(world: tessera.World) -> None:
    """torch.distributed in addition to our World, over the launcher's store: a DeviceMesh wants it."""
    if not dist.is_initialized():
        if "RANK" in os.environ:
            dist.init_process_group("gloo")
        else:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def refusal(mesh: object, *words: str) -> None:
    """The mesh is refused by an error of kind "usage" that has these words."""
    with pytest.raises(tessera.Error) as caught:
        _world.bound_mesh(mesh)  # type: ignore[arg-type]
    assert caught.value.kind == "usage"
    for word in words:
        assert word in str(caught.value)


@pytest.mark.usefixtures("group")
def test_distributed_data_parallel_of_a_sharded_module_is_refused(world: tessera.World) -> None:
    """As accelerate's prepare() would make one: it sends rank 0's shards to all ranks."""
    model = tessera.fully_shard(torch.nn.Linear(4, 2 * world.size))
    before = [shard.detach().clone() for shard in model.parameters()]
    with pytest.raises(tessera.Error, match=r"found a sharded module.*accelerate's prepare\(\)"):
        torch.nn.parallel.DistributedDataParallel(model)
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))


def test_properties_are_those_of_the_launcher(world: tessera.World) -> None:
    """Rank, size and local rank are the launcher's; the CPU's backend is Gloo, or none for one rank."""
    assert world.rank == int(os.environ.get("RANK", 0))
    assert world.size == int(os.environ.get("WORLD_SIZE", 1))
    assert world.local_rank == int(os.environ.get("LOCAL_RANK", 0))
    assert world.device == torch.device("cpu")
    assert world.backend == ("gloo" if world.size > 1 else "none")
    assert (world.closed, world.aborted) == (False, False)
    assert f"rank {world.rank} of {world.size}" in repr(world)


def test_second_init_returns_the_same_world(world: tessera.World) -> None:
    """Without arguments, and with those of the first; others are refused with both named."""
    assert tessera.init() is world
    assert tessera.world() is world
    with pytest.raises(tessera.Error, match=r"timeout=7\.0.*timeout=None.*close") as caught:
        tessera.init(timeout=datetime.timedelta(seconds=7))
    assert caught.value.kind == "usage"


@pytest.mark.parametrize("op", ["sum", "max", "min"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_all_reduce_is_that_of_all_ranks(world: tessera.World, op: str, dtype: torch.dtype) -> None:
    """In place, returned, and equal to the operation over what each rank gives."""
    given = [torch.tensor([[1, 2], [3, 4]], dtype=dtype) * (rank - 1) for rank in range(world.size)]
    stacked = torch.stack(given)
    expected = {"sum": stacked.sum(0), "max": stacked.amax(0), "min": stacked.amin(0)}[op].to(dtype)
    tensor = given[world.rank].clone()
    found = world.all_reduce(tensor, op)  # type: ignore[arg-type]
    assert found is tensor
    assert torch.equal(tensor, expected)


def test_all_reduce_refuses_before_it_sends(world: tessera.World) -> None:
    """An unknown operation and a tensor that requires grad are errors of kind "usage"; the World continues."""
    with pytest.raises(tessera.Error, match='found op "mean", expected "sum", "max" or "min"') as caught:
        world.all_reduce(torch.ones(2), "mean")  # type: ignore[arg-type]
    assert caught.value.kind == "usage"
    with pytest.raises(tessera.Error) as caught:
        world.all_reduce(torch.ones(2, requires_grad=True))
    assert caught.value.kind == "usage"
    world.barrier()
    assert not world.aborted


@pytest.mark.fails_world
def test_error_of_one_rank_reaches_all_and_recover_mends_it(world: tessera.World) -> None:
    """Shapes that differ are an error of kind "comm" on every rank; after recover() sums are right."""
    if world.size == 1:
        pytest.skip("one rank differs from none")
    before = world.recoveries
    with pytest.raises(tessera.Error) as caught:
        world.all_reduce(torch.ones(2 + world.rank))
    assert caught.value.kind == "comm"
    assert world.aborted
    world.recover()
    assert (world.aborted, world.recoveries) == (False, before + 1)
    assert world.all_reduce(torch.ones(2)).tolist() == [world.size] * 2


def test_a_world_is_of_its_process(world: tessera.World) -> None:
    """Copies and pickles are refused by name."""
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(tessera.Error, match=r"call tessera\.init\(\) in each process"):
            attempt(world)


def test_mesh_without_arguments_shards_over_all(world: tessera.World) -> None:
    """The axes of tessera.Mesh; None of fully_shard is the same."""
    for mesh in (tessera.Mesh(), tessera.Mesh(dp_replicate=1, dp_shard=world.size), tessera.Mesh(dp_shard=world.size)):
        assert (mesh.dp_replicate, mesh.dp_shard) == (1, world.size)
    copies = tessera.Mesh(dp_replicate=world.size)
    assert (copies.dp_replicate, copies.dp_shard) == (world.size, 1)
    assert _world.bound_mesh(None).dp_shard == world.size
    assert _world.bound_mesh(copies).dp_replicate == world.size


@pytest.mark.parametrize("replicate", [0, -1, 3, 1000])
def test_mesh_of_another_size_is_refused(world: tessera.World, replicate: int) -> None:
    """Both sizes are named."""
    with pytest.raises(tessera.Error, match=f"dp_replicate={replicate}, expected a divisor of the World's"):
        tessera.Mesh(dp_replicate=replicate)
    with pytest.raises(tessera.Error) as caught:
        tessera.Mesh(dp_replicate=2, dp_shard=world.size)
    assert caught.value.kind == "config"


@pytest.mark.usefixtures("group")
def test_device_mesh_of_one_or_two_dims_is_taken(world: tessera.World) -> None:
    """One dim is dp_shard under any name; two are dp_replicate x dp_shard, in this order."""
    n = world.size
    for names in (None, ("dp",), ("fsdp",), ("dp_shard",)):
        mesh = _world.bound_mesh(DeviceMesh("cpu", list(range(n)), mesh_dim_names=names))
        assert (mesh.dp_replicate, mesh.dp_shard) == (1, n)
    for names in (None, ("replicate", "shard"), ("dp_replicate", "dp_shard")):
        mesh = _world.bound_mesh(DeviceMesh("cpu", [[rank] for rank in range(n)], mesh_dim_names=names))
        assert (mesh.dp_replicate, mesh.dp_shard) == (n, 1)
        mesh = _world.bound_mesh(DeviceMesh("cpu", [list(range(n))], mesh_dim_names=names))
        assert (mesh.dp_replicate, mesh.dp_shard) == (1, n)


@pytest.mark.usefixtures("group")
def test_other_device_meshes_are_refused_by_name(world: tessera.World) -> None:
    """Axes of models, three dims, swapped names, ranks that are not all or not in order, and other objects."""
    n = world.size
    for name in ("tp", "ep", "etp", "cp", "pp"):
        refusal(DeviceMesh("cpu", [list(range(n))], mesh_dim_names=("dp", name)), f"no dim '{name}'", "docs/fsdp2.md")
    refusal(DeviceMesh("cpu", [[list(range(n))]]), f"1 x 1 x {n}", "expected one dim (dp_shard) or two")
    refusal(DeviceMesh("cpu", [list(range(n))], mesh_dim_names=("dp_shard", "dp_replicate")), "swap the dims")
    refusal(object(), "found object, expected None, tessera.Mesh or a torch DeviceMesh")
    if n > 1:
        refusal(DeviceMesh("cpu", list(reversed(range(n)))), "in order")
        refusal(DeviceMesh("cpu", [world.rank]), f"ranks [{world.rank}], expected all {n}")


@pytest.mark.usefixtures("group")
def test_device_mesh_shards_a_module(world: tessera.World) -> None:
    """The mesh that fully_shard was given cuts the parameters: a rank of a copy has all of them."""
    n = world.size
    whole = tessera.fully_shard(nn.Linear(8, 4, bias=False), mesh=DeviceMesh("cpu", [[rank] for rank in range(n)]))
    part = tessera.fully_shard(nn.Linear(8, 4, bias=False), mesh=DeviceMesh("cpu", list(range(n))))
    assert sum(shard.numel() for shard in whole.parameters()) == 32
    total = torch.tensor([float(sum(shard.numel() for shard in part.parameters()))])
    assert world.all_reduce(total).item() == 32


def test_hooks_of_exceptions_are_chained(world: tessera.World) -> None:
    """With other ranks, ours come before those that were there; alone, nothing is changed."""
    ours = [hook.__module__ == "tessera._world" for hook in (threading.excepthook, sys.exit)]
    assert ours == [world.size > 1] * 2


@pytest.mark.parametrize(
    ("status", "code", "arguments"),
    [((), None, ()), ((None,), None, ()), ((0,), 0, (0,)), ((3,), 3, (3,)), (("text",), "text", ("text",))],
)
def test_sys_exit_raises_what_it_raised(
    world: tessera.World, status: tuple[object, ...], code: object, arguments: tuple[object, ...]
) -> None:
    """A caller that catches SystemExit reads the same code and arguments, and may set another code."""
    with pytest.raises(SystemExit) as caught:
        sys.exit(*status)  # type: ignore[arg-type]
    assert (caught.value.code, caught.value.args) == (code, arguments)
    assert type(caught.value).__name__ == "SystemExit"
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (type(copied), copied.code, copied.args) == (SystemExit, code, arguments)
    caught.value.code = 5
    assert caught.value.code == 5
    assert not world.closed


def test_init_timeout_ends_the_wait_for_ranks_that_do_not_come() -> None:
    """As seconds or a timedelta; None, and nonsense, are told apart."""
    begin = time.monotonic()
    with pytest.raises(tessera.Error, match=r"rank 1 of 2 did not come within 0\.3 s") as caught:
        _C.World.from_store(dist.HashStore(), 0, 2, backend="gloo", device="cpu", timeout=None, init_timeout=0.3)
    assert caught.value.kind == "comm"
    assert time.monotonic() - begin < 10
    with pytest.raises(tessera.Error, match=r"init_timeout=-1, expected a positive number") as refused:
        tessera.init(init_timeout=-1)
    assert refused.value.kind == "usage"
    with pytest.raises(tessera.Error, match=r"second call with .*init_timeout=7\.0.*init_timeout="):
        tessera.init(init_timeout=datetime.timedelta(seconds=7))


def test_words_of_an_exception_fit_one_line() -> None:
    """Its class, its message and the line that raised it; of an exit code, what was caught before."""

    def failing() -> None:
        raise ValueError("two\nlines")

    with pytest.raises(ValueError, match="two") as caught:
        failing()
    words = _world.text_of(caught.value)
    assert words.startswith("ValueError: two lines (test_world.py:")

    def leaving() -> None:
        try:
            failing()
        except ValueError:
            sys.exit(1)

    with pytest.raises(SystemExit) as left:
        leaving()
    assert _world.text_of(left.value).startswith("sys.exit(1), after ValueError: two lines (test_world.py:")
