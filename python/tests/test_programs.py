"""Drawn Python programs (programs.py, program_runs.py) give what plain autograd gives, and planted faults do not pass.

TESSERA_PROGRAM_SEED=N shows program N and runs it alone; TESSERA_FULL=1 runs 5000 instead of 300.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import program_runs
import programs
import pytest
import tessera
from support import FULL
from tessera import _containers, _module, _tree
from torch import nn

SEED = int(os.environ.get("TESSERA_PROGRAM_SEED", "0"))
FIRST = int(os.environ.get("TESSERA_PROGRAM_FROM", "1"))
COUNT = int(os.environ.get("TESSERA_PROGRAM_COUNT", "5000" if FULL else "300"))
EACH = 25


def holds(seed: int, world: Any) -> None:
    """Runs one program; what it raises says which."""
    source = programs.draw(seed)
    try:
        program_runs.run(source, world)
    except BaseException as error:
        error.add_note(f"program {seed}; TESSERA_PROGRAM_SEED={seed} shows and runs it:\n{source}")
        raise


@pytest.mark.skipif(SEED == 0, reason="TESSERA_PROGRAM_SEED names no program")
def test_the_program_of_the_environment(world: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The one that somebody looks at."""
    with capsys.disabled():
        print(f"\n{programs.draw(SEED)}" if world.rank == 0 else "")
    holds(SEED, world)


@pytest.mark.skipif(SEED != 0, reason="TESSERA_PROGRAM_SEED names one")
@pytest.mark.parametrize("first", range(FIRST, FIRST + COUNT, EACH))
def test_drawn_programs_give_what_plain_autograd_gives(world: Any, first: int) -> None:
    """Results, gradients, norms, steps and buffers of 25 programs in a row, in one World."""
    for seed in range(first, min(first + EACH, FIRST + COUNT)):
        holds(seed, world)


# --- planted faults: what the generator is for ---


def _arguments_stay_as_they_are(patch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A unit's arguments are neither cast nor marked."""
    put = _containers.put

    def skip(value: Any, tensors: Any, undo: Any) -> Any:
        return put(value, tensors, undo) if undo is None and not isinstance(value, (tuple, dict)) else value

    patch.setattr(_containers, "put", skip)
    return tessera.fully_shard


def _tensors_in_dicts_are_not_seen(patch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Arguments and results in dicts pass a unit as they are."""
    find, put = _containers.find, _containers.put

    def find_less(value: Any, found: list[Any]) -> None:
        if not (isinstance(value, dict) and "text" in value):
            find(value, found)

    def put_less(value: Any, tensors: Any, undo: Any) -> Any:
        return value if isinstance(value, dict) and "text" in value else put(value, tensors, undo)

    patch.setattr(_containers, "find", find_less)
    patch.setattr(_containers, "put", put_less)
    return tessera.fully_shard


def _averaged_twice(patch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The sum over the ranks is divided by their number and once more."""

    def shard(module: Any, **options: Any) -> Any:
        return tessera.fully_shard(module, **{**options, "divide_factor": 4.0})

    return shard


def _a_tied_place_has_values_of_its_own(patch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The second place of a tied parameter gets a copy, which is a parameter of its own."""
    leaf = _tree.Tree._leaf

    def copied(self: Any, module: Any, key: str, path: str, parameter: Any) -> Any:
        if id(parameter) in self._first and parameter not in _tree.LEAVES:
            parameter = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            module._parameters[key] = parameter
        return leaf(self, module, key, path, parameter)

    patch.setattr(_tree.Tree, "_leaf", copied)
    return tessera.fully_shard


def _tied_places_are_one_tensor(patch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Autograd adds their gradients, in the dtype that they have."""
    patch.setattr(_tree.Tree, "_leaf", lambda self, module, key, path, parameter: parameter)
    return tessera.fully_shard


def _sync_does_not_reach_inner_units(patch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """set_requires_gradient_sync of the outermost module changes that module alone."""
    control = tessera.FSDPModule.set_requires_gradient_sync

    def narrow(self: Any, value: bool, *, recurse: bool = True) -> None:
        control(self, value, recurse=False)

    patch.setattr(tessera.FSDPModule, "set_requires_gradient_sync", narrow)
    return tessera.fully_shard


def _frozen_parameters_train(patch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """requires_grad is lost on the way."""

    def shard(module: Any, **options: Any) -> Any:
        for parameter in nn.Module.parameters(module):
            if parameter not in _tree.LEAVES:
                parameter.requires_grad_(True)
        return tessera.fully_shard(module, **options)

    return shard


def _gradients_are_not_dropped(patch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """zero_grad() does nothing."""
    patch.setattr(tessera.FSDPModule, "zero_grad", lambda self, set_to_none=True: None)
    return tessera.fully_shard


def _output_dtype_is_lost(patch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A unit's results stay as they come."""
    of = _module.policy_of
    patch.setattr(_module, "policy_of", lambda policy: (of(policy)[0], None))
    return tessera.fully_shard


def _a_rule_is_lost(patch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Pins of single parameters."""
    of = _module.policy_of
    patch.setattr(_module, "policy_of", lambda policy: of(dataclasses.replace(policy, rules=())))
    return tessera.fully_shard


FAULTS = [
    _arguments_stay_as_they_are,
    _tensors_in_dicts_are_not_seen,
    _averaged_twice,
    _a_tied_place_has_values_of_its_own,
    _tied_places_are_one_tensor,
    _sync_does_not_reach_inner_units,
    _frozen_parameters_train,
    _gradients_are_not_dropped,
    _output_dtype_is_lost,
    _a_rule_is_lost,
]


@pytest.mark.skipif(SEED != 0, reason="TESSERA_PROGRAM_SEED names one")
@pytest.mark.fails_world
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__.strip("_"))
def test_a_planted_fault_is_found_within_sixty_programs(
    world: Any, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], Callable[..., Any]]
) -> None:
    """Each fault in the package's Python makes one of the first sixty programs differ, or fail."""
    shard = fault(monkeypatch)
    for seed in range(FIRST, FIRST + 60):
        try:
            program_runs.run(programs.draw(seed), world, shard)
        except (AssertionError, RuntimeError) as error:
            assert getattr(error, "kind", "") != "comm", "found a wait, expected a difference"
            del error
            world.recover()
            return
    pytest.fail("found no program that differs")
