"""Drawn Python programs (programs.py) give what plain autograd gives, and planted faults do not pass.

TESSERA_PROGRAM_SEED=N shows program N and runs it alone; TESSERA_FULL=1 runs 5000 instead of 300.
"""

from __future__ import annotations

import os
from typing import Any

import programs
import pytest
from support import FULL

SEED = int(os.environ.get("TESSERA_PROGRAM_SEED", "0"))
FIRST = int(os.environ.get("TESSERA_PROGRAM_FROM", "1"))
COUNT = int(os.environ.get("TESSERA_PROGRAM_COUNT", "5000" if FULL else "300"))
EACH = 25


def holds(seed: int, world: Any) -> None:
    """Runs one program; what it raises says which."""
    source = programs.draw(seed)
    try:
        programs.run(source, world)
    except BaseException as error:
        error.add_note(f"program {seed}; TESSERA_PROGRAM_SEED={seed} shows and runs it:\n{source}")
        raise


@pytest.mark.skipif(SEED == 0, reason="TESSERA_PROGRAM_SEED names no program")
def test_the_program_of_the_environment(world: Any) -> None:
    """The one that somebody looks at."""
    print(programs.draw(SEED))
    holds(SEED, world)


@pytest.mark.skipif(SEED != 0, reason="TESSERA_PROGRAM_SEED names one")
@pytest.mark.parametrize("first", range(FIRST, FIRST + COUNT, EACH))
def test_drawn_programs_give_what_plain_autograd_gives(world: Any, first: int) -> None:
    """Results, gradients, norms, steps and buffers of 25 programs in a row, in one World."""
    for seed in range(first, min(first + EACH, FIRST + COUNT)):
        holds(seed, world)
