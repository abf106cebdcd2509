"""Checkpoints: any number of ranks resumes from what any other has saved.

Ranks that write files share a folder of the run (`folder`), which rank 0 makes and removes.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import tessera
import torch
from states import OPTIMIZERS, WIDTH, Counter, advance, assert_same_dicts, mse, stepped
from support import MLP_UNITS, Mlp, drawn, shard_layers
from tessera import SGD, AdamW, MixedPrecisionPolicy, fully_shard
from torch import nn

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(world: Any, request: pytest.FixtureRequest) -> Iterator[pathlib.Path]:
    """A folder that all ranks see."""
    run = os.environ.get("MASTER_PORT", os.getpid())
    path = pathlib.Path(tempfile.gettempdir(), f"tessera_{run}_{request.node.name}")
    yield path
    world.barrier()
    if world.rank == 0:
        shutil.rmtree(path, ignore_errors=True)


ONE_RANK = """
import sys
sys.path.insert(0, "python/tests")
import tessera, torch
from support import Mlp, drawn
WIDTH = 16
tessera.init()
model = tessera.fully_shard(Mlp(WIDTH, seed=11))
optimizer = tessera.AdamW(model, lr=0.01)
found = tessera.load_checkpoint(model, optimizer, sys.argv[1])
assert (found.step, found.world_size, found.user) == (2, int(sys.argv[3]), {"epoch": 3, "name": "run"}), found
model(drawn(4, shape=(4, WIDTH))).sum().backward()
optimizer.step()
tessera.save_checkpoint(model, optimizer, sys.argv[2], 3)
"""


class TestCheckpoints:
    """Checkpoints in the format of docs/checkpoint.md."""

    def test_to_one_rank_and_back(self, world: Any, folder: pathlib.Path) -> None:
        """One rank resumes from what these ranks have saved, and these from what it has saved, with its bits.

        The program `tessera` lists the tensors of both.
        """
        model, optimizer, plain, optimizers = stepped(world, *OPTIMIZERS["AdamW"])
        assert not tessera.has_checkpoint(folder / "first")
        tessera.save_checkpoint(model, optimizer, folder / "first", 2, user={"epoch": 3, "name": "run"})
        assert tessera.has_checkpoint(folder / "first")
        if world.rank == 0:
            of_ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
            alone = {k: v for k, v in os.environ.items() if k not in of_ranks and not k.startswith("TORCHELASTIC")}
            words = [sys.executable, "-c", ONE_RANK, folder / "first", folder / "second", str(world.size)]
            subprocess.run(words, check=True, cwd=ROOT, env=alone)
            program = pathlib.Path(tessera.__file__).parent / "lib/tessera/tessera"
            for name in ("first/step-2", "second/step-3"):
                words = [program, "inspect", folder / name, "--json"]
                listed = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
                tensors = listed["tensors"]
                for place in ("model", "optim/exp_avg", "optim/exp_avg_sq"):
                    assert all(f"{place}/{parameter}" in tensors for parameter in plain.parameters())
                assert tensors["model/layers.0.weight"]["shape"] == [WIDTH, WIDTH]
        world.barrier()
        for each, own in zip(plain.copies, optimizers, strict=True):
            each(drawn(4, shape=(4, WIDTH))).sum().backward()
            own.step()
            own.zero_grad()
        other = shard_layers(Mlp(WIDTH, seed=8), MLP_UNITS[1:])
        continued = AdamW(other, lr=0.01)
        found = tessera.load_checkpoint(other, continued, folder / "second")
        assert (found.step, found.world_size, found.user) == (3, 1, {})
        assert pathlib.Path(found.path) == folder / "second" / "step-3"
        advance(world, other, continued, plain, optimizers)

    def test_the_learning_rate_continues(self, world: Any, folder: pathlib.Path) -> None:
        """What a scheduler has made of the rate is saved, and its own state resumes from there: the run that resumed
        and the one that was loaded step alike."""

        def made() -> tuple[Any, Any, Any]:
            model = shard_layers(Mlp(WIDTH), MLP_UNITS)
            optimizer = AdamW(model, lr=0.1)
            return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

        def step(model: Any, optimizer: Any, scheduler: Any, number: int) -> None:
            mse(model, world.rank, number).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

        first, second = made(), made()
        step(*first, 0)
        tessera.save_checkpoint(first[0], first[1], folder, 1, user={"epoch": 2})
        assert tessera.load_checkpoint(second[0], second[1], folder).user == {"epoch": 2}
        second[2].load_state_dict(first[2].state_dict())
        assert second[1].param_groups[0]["lr"] == 0.05
        for number in (1, 2):
            step(*first, number)
            step(*second, number)
        assert second[1].param_groups[0]["lr"] == first[1].param_groups[0]["lr"] == 0.0125
        assert_same_dicts(first[0].state_dict(), second[0].state_dict())

    def test_scaler_latest_and_refusals(self, world: Any, folder: pathlib.Path) -> None:
        """The loss scale is saved; keep_latest_k removes; what does not fit is named, and nothing has changed."""
        model = shard_layers(Mlp(WIDTH), MLP_UNITS, mp_policy=MixedPrecisionPolicy(loss_scaling=True))
        optimizer, scaler = SGD(model, lr=0.1, momentum=0.5), tessera.GradScaler(model, init_scale=64.0)
        for step in (1, 2):
            scaler.scale(mse(model, world.rank, step)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            tessera.save_checkpoint(model, optimizer, folder, step, scaler=scaler, keep_latest_k=1)
        assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-2"]
        scaler.load_state_dict({**scaler.state_dict(), "scale": 4.0})
        assert tessera.load_checkpoint(model, optimizer, folder, scaler=scaler).step == 2
        assert scaler.get_scale() == 64.0
        assert scaler.state_dict()["_growth_tracker"] == 2
        before = model.state_dict()
        with pytest.raises(tessera.Error, match="SGD") as caught:
            tessera.load_checkpoint(model, AdamW(model), folder)
        assert caught.value.kind == "config"
        with pytest.raises(tessera.Error, match="step 0") as caught:
            tessera.save_checkpoint(model, optimizer, folder, 0)
        assert caught.value.kind == "usage"
        with pytest.raises(tessera.Error, match="found no checkpoint") as caught:
            tessera.load_checkpoint(model, optimizer, folder / "nothing")
        assert caught.value.kind == "io"
        with pytest.raises(tessera.Error, match=r"torch\.optim\.sgd\.SGD, expected an optimizer of tessera"):
            tessera.save_checkpoint(model, torch.optim.SGD(model.parameters()), folder, 3)
        assert_same_dicts(model.state_dict(), before)

    def test_what_would_be_lost_is_named(self, world: Any, folder: pathlib.Path) -> None:
        """Ignored parameters and extra state, which the format does not hold, are refused; nothing is written."""
        model = Mlp(WIDTH)
        fully_shard(model, ignored_params=[model.layers[0].bias])
        with pytest.raises(tessera.Error, match=r"found layers\.0\.bias, which sharding does not know"):
            tessera.save_checkpoint(model, AdamW(model), folder, 0)
        other = fully_shard(nn.Sequential(Counter(), nn.Linear(WIDTH, WIDTH)))
        with pytest.raises(tessera.Error, match=r"found 0\._extra_state"):
            tessera.save_checkpoint(other, AdamW(other), folder, 0)
        assert not folder.exists()
