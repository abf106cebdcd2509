"""What every test of the Python module starts with and leaves behind; ranks.py runs it on several ranks."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
from collections.abc import Generator, Iterator

import pytest
import tessera
import torch

SEED = 20261129
# Of the process, for each of which a test has to leave the value that it found.
STATE = {
    "grad mode": torch.is_grad_enabled,
    "default dtype": torch.get_default_dtype,
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "autocast": lambda: torch.is_autocast_enabled("cpu"),
}


def pytest_configure(config: pytest.Config) -> None:
    # Before pytest captures the output of tests; ranks.py sends the signal to what does not end.
    faulthandler.register(signal.SIGUSR1, file=os.fdopen(os.dup(2), "w"))
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def world() -> Iterator[tessera.World]:
    """The World of all tests: the ranks that ranks.py starts; in a plain pytest, one rank."""
    with tessera.init() as joined:
        yield joined


@pytest.fixture(scope="session")
def rank(world: tessera.World) -> int:
    """The number of this rank."""
    return world.rank


@pytest.fixture(autouse=True)
def clean(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test draws the same numbers, and leaves a World in which all ranks meet, and torch's modes as they were.

    After a test that is marked fails_world, whose collective has failed on purpose, all ranks recover.
    """
    torch.manual_seed(SEED)
    random.seed(SEED)
    before = {name: of() for name, of in STATE.items()}
    world: tessera.World | None = None
    if "world" in request.fixturenames or "RANK" in os.environ:
        world = request.getfixturevalue("world")
    yield
    assert {name: of() for name, of in STATE.items()} == before, "the test has left another mode of torch behind"
    if world is None or world.closed or request.node.stash.get(FAILED, False):
        return
    if request.node.get_closest_marker("fails_world") and world.aborted:
        world.recover()
    assert not world.aborted, "the test has left an aborted World behind, which it does not say (fails_world)"
    world.barrier()


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """The other ranks may wait in a collective for a rank whose test has failed: they hear of it, and fail, too."""
    report = yield
    if report.failed and "RANK" in os.environ:
        item.stash[FAILED] = True
        try:
            current = tessera.world()
        except tessera.Error:
            return report
        words = call.excinfo.exconly() if call.excinfo else "failed"
        current.close_failed(f"{report.when} of {report.nodeid} on rank {os.environ['RANK']}: {words}")
    return report
