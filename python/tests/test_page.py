"""docs/python.md: its blocks run, and its names are those of the package and of FSDP2."""

from __future__ import annotations

import inspect
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import tessera
import torch
from torch.distributed import fsdp

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/python.md").read_text(encoding="utf-8")


class Block(NamedTuple):
    """A fenced block and the comment above it, which says what a test makes of it."""

    line: int
    language: str
    note: str
    text: str


def blocks() -> Iterator[Block]:
    """Yields the blocks of the page. `<!-- test: run -->` and `program NAME` are run; `skip, WHY` are not."""
    found = re.finditer(r"(?:^<!-- test: (.*) -->\n)?^```(\w+)\n([\s\S]*?)^```$", PAGE, re.MULTILINE)
    for match in found:
        yield Block(PAGE.count("\n", 0, match.start(3)), match[2], match[1] or "", match[3])


@pytest.fixture
def folder(world: tessera.World, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """An empty folder, the same for all ranks, as the working directory."""
    place = pathlib.Path(tempfile.gettempdir(), f"tessera_page_{os.environ.get('MASTER_PORT', os.getpid())}")
    place.mkdir(exist_ok=True)
    world.barrier()
    monkeypatch.chdir(place)
    yield place
    if not world.closed:
        world.barrier()
    shutil.rmtree(place, ignore_errors=True)


def test_all_blocks_of_python_run_as_one_program(folder: pathlib.Path) -> None:
    """Every block runs, in the order of the page, with the names that the blocks before have left."""
    names: dict[str, Any] = {"__name__": "page"}
    ran = 0
    for block in blocks():
        assert block.note, f"docs/python.md:{block.line}: found no comment, expected run, program NAME or skip, WHY"
        if block.language != "python" or block.note.startswith("skip, "):
            continue
        assert block.note == "run" or block.note.startswith("program "), f"docs/python.md:{block.line}: {block.note}"
        exec(compile("\n" * block.line + block.text, str(ROOT / "docs/python.md"), "exec"), names)
        ran += 1
    assert ran >= 5
    assert (folder / "saved").is_dir()  # what the first program has written


def rows() -> list[list[str]]:
    """Returns the rows of the table of FSDP2's names, three cells each."""
    table = PAGE.split("| FSDP2 (torch", 1)[1].split("\n\n", 1)[0]
    found = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]
    assert all(len(row) in (2, 3) for row in found), [row for row in found if len(row) not in (2, 3)]
    return found


def names_in(cell: str) -> list[str]:
    """Returns the identifiers that stand in backticks, without their arguments."""
    return [re.split(r"[(=\[ ]", quoted)[0] for quoted in re.findall(r"`([^`]+)`", cell)]


def test_the_table_has_every_name_of_fsdp2() -> None:
    """No public method of FSDP2's module and no argument of its fully_shard is left out."""
    listed = {name.removeprefix("module.") for row in rows() for name in names_in(row[0])}
    methods = {name for name, _ in inspect.getmembers(fsdp.FSDPModule, inspect.isfunction) if not name.startswith("_")}
    assert len(methods) > 15
    assert methods - listed == set()
    arguments = set(inspect.signature(fsdp.fully_shard).parameters) - {"module"}
    assert arguments - listed - {"dp_mesh_dims"} == set()


def test_what_is_the_same_is_there_and_what_is_not_there_is_not() -> None:
    """The second column of the table says which methods of FSDP2 a sharded module has."""
    checked = 0
    for first, second, *_ in rows():
        for name in names_in(first):
            name = name.removeprefix("module.")
            if not hasattr(fsdp.FSDPModule, name) or name == "reset_iter_state":
                continue
            if second in ("same", "differs"):
                assert callable(getattr(tessera.FSDPModule, name)), name
            elif second == "not there":
                assert not hasattr(tessera.FSDPModule, name), name
            else:
                raise AssertionError(f"{name}: {second}")
            checked += 1
    assert checked > 15


def test_names_of_the_page_and_of_the_package_are_the_same() -> None:
    """What the page calls `tessera.X` is public, and every public name is on the page."""
    on_page = set(re.findall(r"\btessera\.([A-Za-z_]\w*)", PAGE)) - {"readthedocs"}
    on_page |= set(re.findall(r"^from tessera import (.*)$", PAGE, re.MULTILINE)[0].split(", "))
    public = {name for name in tessera.__all__ if not name.startswith("_")}
    assert on_page - public == set()
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```[\s\S]*?```", "", PAGE))
    quoted = set(re.findall(r"\w+", " ".join(inline + [block.text for block in blocks()])))
    assert public - quoted == set()


def test_elementwise_optimizers_that_the_page_lists_are_those_of_torch() -> None:
    """Every optimizer of torch.optim stands on the page as one that works, or as one that is refused."""
    section = PAGE.split("## Optimizers", 1)[1].split("\n## ", 1)[0]
    there = {
        name
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    assert {name for name in there if not re.search(rf"\b{name}\b", section)} - {"SparseAdam"} == set()
