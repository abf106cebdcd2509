"""Python runs on while a call waits for another rank: the GIL is released in every function that may communicate.

Rank 1 comes to each call half a second late. Meanwhile a Python thread of rank 0 has to tick.
"""

from __future__ import annotations

import gc
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tessera
import torch
from torch import nn

LATE_S = 0.5
TICK_S = 0.005
LONGEST_S = 0.25  # between two ticks: half of the wait would be seen, a busy machine is none

Made = dict[str, Any]


class Ticker:
    """A Python thread that notes the longest time in which it could not run."""

    def __init__(self) -> None:
        self.longest = 0.0
        self.ticks = 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        last = time.monotonic()
        while not self._ends.wait(TICK_S):
            now = time.monotonic()
            self.longest = max(self.longest, now - last)
            self.ticks += 1
            last = now
        self.longest = max(self.longest, time.monotonic() - last)

    def __enter__(self) -> Ticker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()


def model_of(**options: Any) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    for layer in model:
        tessera.fully_shard(layer, **options)
    return tessera.fully_shard(model, **options)


@pytest.fixture(autouse=True, scope="module")
def quiet_collector() -> Iterator[None]:
    """What other tests have imported is no garbage: set_trainable() collects, which holds the GIL for all of it."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A sharded model with gradients, its optimizer, and the dicts of both."""
    model = model_of()
    optimizer = tessera.AdamW(model, lr=1e-3)
    model(torch.ones(2, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer, "input": torch.ones(2, 16)}


def folder_of(world: tessera.World, tmp_path: pathlib.Path) -> pathlib.Path:
    """Rank 0's folder, on every rank."""
    text = str(tmp_path).encode() if world.rank == 0 else b""
    length = int(world.all_reduce(torch.tensor([len(text)])).item())
    letters = torch.zeros(length, dtype=torch.int64)
    letters[: len(text)] = torch.tensor(list(text), dtype=torch.int64)
    return pathlib.Path(bytes(world.all_reduce(letters).tolist()).decode())


def forward_first(act: Callable[[Made], Any]) -> Callable[[Made], Any]:
    """`act` after a forward, in which ranks have met already."""
    act.before = lambda made: made.update(loss=made["model"](made["input"]).square().mean())  # type: ignore[attr-defined]
    return act


def gradients_first(act: Callable[[Made], Any]) -> Callable[[Made], Any]:
    """`act` after a backward."""
    act.before = lambda made: made["model"](made["input"]).square().mean().backward()  # type: ignore[attr-defined]
    return act


def state_first(act: Callable[[Made], Any]) -> Callable[[Made], Any]:
    """`act` with the whole dicts."""

    def before(made: Made) -> None:
        made["state"] = {name: each.clone() for name, each in made["model"].state_dict().items()}
        made["optimizer state"] = tessera.get_optimizer_state_dict(made["model"], made["optimizer"])

    act.before = before  # type: ignore[attr-defined]
    return act


def set_prefetch(made: Made) -> None:
    made["model"].set_modules_to_forward_prefetch([made["model"][1]])
    made["model"](made["input"])


CALLS: dict[str, Callable[[Made], Any]] = {
    "barrier": lambda made: made["world"].barrier(),
    "all_reduce": lambda made: made["world"].all_reduce(torch.ones(3)),
    "recover": lambda made: made["world"].recover(),
    "fully_shard": lambda made: tessera.fully_shard(nn.Linear(4, 4)),
    "forward": lambda made: made["model"](made["input"]),
    "forward without grad": torch.no_grad()(lambda made: made["model"](made["input"])),
    "backward": forward_first(lambda made: made["loss"].backward()),
    "unshard": lambda made: made["model"][0].unshard(),
    "unshard handle": lambda made: made["model"][0].unshard(async_op=True).wait(),
    "prefetch": set_prefetch,
    "set_trainable": lambda made: made["model"].set_trainable({"0.weight": False}),
    "full_parameters": lambda made: list(tessera.full_parameters(made["model"])),
    "full_gradients": gradients_first(lambda made: list(tessera.full_gradients(made["model"]))),
    "full_tensor": lambda made: next(iter(made["model"].parameters())).full_tensor(),
    "full_grad": gradients_first(lambda made: next(iter(made["model"].parameters())).full_grad()),
    "gradient_norm": gradients_first(lambda made: tessera.gradient_norm(made["model"])),
    "clip_grad_norm_": gradients_first(lambda made: tessera.clip_grad_norm_(made["model"], 1.0)),
    "nonfinite_parameters": gradients_first(lambda made: tessera.nonfinite_parameters(made["model"])),
    "Muon.step": gradients_first(lambda made: tessera.Muon(made["model"], lr=1e-3).step()),
    "GradScaler.step": gradients_first(lambda made: tessera.GradScaler(made["model"]).step(made["optimizer"])),
    "state_dict": lambda made: made["model"].state_dict(),
    "load_state_dict": state_first(lambda made: made["model"].load_state_dict(made["state"])),
    "get_model_state_dict": lambda made: tessera.get_model_state_dict(made["model"]),
    "set_model_state_dict": state_first(lambda made: tessera.set_model_state_dict(made["model"], made["state"])),
    "get_optimizer_state_dict": lambda made: tessera.get_optimizer_state_dict(made["model"], made["optimizer"]),
    "set_optimizer_state_dict": state_first(
        lambda made: tessera.set_optimizer_state_dict(made["model"], made["optimizer"], made["optimizer state"])
    ),
    "save_checkpoint": lambda made: tessera.save_checkpoint(made["model"], made["optimizer"], made["folder"], 1),
    "load_checkpoint": lambda made: tessera.load_checkpoint(made["model"], made["optimizer"], made["folder"]),
}


@pytest.fixture(scope="module")
def folder(world: tessera.World, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Of checkpoints: the same on every rank, and the calls above write and read it in their order."""
    return folder_of(world, tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize("name", list(CALLS))
def test_python_runs_on_while_a_call_waits(world: tessera.World, made: Made, folder: pathlib.Path, name: str) -> None:
    """No tick of rank 0 comes later than half of the time for which rank 1 is late, and the call does wait for it."""
    act = CALLS[name]
    made.update(world=world, folder=folder / "checkpoint")
    getattr(act, "before", lambda made: None)(made)
    world.barrier()
    began = time.monotonic()
    if world.rank == world.size - 1 and world.size > 1:
        time.sleep(LATE_S)
        act(made)
    else:
        with Ticker() as ticker:
            act(made)
        waited = time.monotonic() - began
        assert ticker.longest < LONGEST_S, (name, ticker.longest, ticker.ticks)
        assert world.size == 1 or waited > LATE_S / 2, f"{name} communicates with no rank: {waited:.3f} s"
