"""How processes end: every rank of every program of ends.py ends in time, with the words of the one that began.

All jobs of this file are handed to one server at once (ends.py), which runs some at the same time. A test waits for
its own. FULL has 40 drawn ends instead of 6.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

HERE = pathlib.Path(__file__).resolve().parent
PACKAGE = os.environ.get("PYTHONPATH") or str(HERE.parents[1] / "build/release/python")
FULL = os.environ.get("TESSERA_FULL") == "1"
DRAWN = 40 if FULL else 6
ORDERS = 40 if FULL else 20
TOLD_S = 5.0  # from an exception of one rank to the errors of all; seen: 0.2
LOST_S = 10.0  # from that, or from a kill, to the end of all processes; interpreters need a second to end by themselves


@dataclasses.dataclass
class Ended:
    """A job that is over."""

    program: str
    codes: dict[int, int | str]
    said: dict[int, list[dict[str, Any]]]
    out: dict[int, str]
    err: dict[int, str]
    ended_at: dict[int, float]

    def shown(self) -> str:
        """Everything, for a failed assertion."""
        lines = [f"{self.program}: {self.codes}"]
        for rank, said in self.said.items():
            lines += [f"--- rank {rank}", *map(str, said), self.out.get(rank, ""), self.err.get(rank, "")]
        return "\n".join(lines)

    def when(self, rank: int, key: str) -> float:
        return next(line["at"] for line in self.said[rank] if key in line)

    def seconds_after(self, rank: int) -> float:
        """From the moment in which the rank began to end until the last one had ended."""
        return max(self.ended_at.values()) - self.when(rank, "ends")

    def told_after(self, ends: int) -> float:
        """From the same moment until the last of the others had caught its error, and its `finally` had run."""
        return max(self.when(rank, "finally_ran") for rank in set(self.codes) - {ends}) - self.when(ends, "ends")

    def has(self, rank: int, key: str) -> bool:
        return any(key in line for line in self.said[rank])


class Jobs:
    """The server of ends.py, and what it has reported."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.lock = threading.Condition()
        self.results: dict[int, dict[str, Any]] = {}
        self.over = False
        self.numbers: dict[str, int] = {}
        environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        environment.update(PYTHONPATH=PACKAGE, OMP_NUM_THREADS="1")
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "ends.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            result = json.loads(line)
            with self.lock:
                self.results[result["number"]] = result
                self.lock.notify_all()
        with self.lock:
            self.over = True
            self.lock.notify_all()

    def send(self, key: str, program: str, size: int = 2, limit: float = 40.0, **more: Any) -> None:
        number = self.numbers[key] = len(self.numbers)
        folder = self.folder / str(number)
        folder.mkdir()
        job = {"number": number, "program": program, "size": size, "limit": limit, "folder": str(folder), **more}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job).encode() + b"\n")
        self.process.stdin.flush()

    def ended(self, key: str) -> Ended:
        number = self.numbers[key]
        with self.lock:
            self.lock.wait_for(lambda: self.over or number in self.results, timeout=240)
            assert number in self.results, f"{key}: the server of ends.py reported nothing of it"
            result = self.results[number]
        folder = pathlib.Path(result["folder"])
        ranks = range(result["size"])
        said: dict[int, list[dict[str, Any]]] = {rank: [] for rank in ranks}
        for file in folder.glob("said.*"):  # processes that a rank has started say something, too
            said[int(file.suffix[1:])] = [json.loads(line) for line in file.read_text().splitlines()]
        return Ended(
            result["program"],
            {int(rank): code for rank, code in result["codes"].items()},
            said,
            {rank: (folder / f"out.{rank}").read_text() for rank in ranks},
            {rank: (folder / f"err.{rank}").read_text() for rank in ranks},
            {int(rank): result["began"] + seconds for rank, seconds in result["seconds"].items()},
        )

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(200)  # for the jobs of tests that were left out, too


def drawn_job(seed: int) -> tuple[int, int]:
    """The size, and the rank that ends, as `drawn` of ends.py draws it."""
    size = 2 + seed % 2
    return size, random.Random(seed).randrange(size)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    jobs = Jobs(tmp_path_factory.mktemp("ends"))
    jobs.send("interrupted", "interrupted")
    for program in ONE_ENDS:
        jobs.send(program, program, size=3 if program.startswith("killed") else 2, who=1)
    jobs.send("rank 0", "uncaught", size=3, who=0)
    jobs.send("rank 0 killed", "killed", who=0)
    for program in ("interrupted_to_its_end", "fails_while_others_are_done", *GOOD_ENDS):
        jobs.send(program, program, who=1)
    jobs.send("alone", "closes_twice", size=1, launched=False)
    for method, fails in SPAWNS:
        jobs.send(f"spawn {method} {fails}", "spawns", size=1, launched=False, start_method=method, fails=fails, who=1)
    for seed in range(DRAWN):
        size, who = drawn_job(seed)
        jobs.send(f"drawn {seed}", "drawn", size=size, who=who, seed=seed)
    for seed in range(ORDERS):
        jobs.send(f"order {seed}", "dies_in_order", size=1 + seed % 2, seed=seed)
    yield jobs
    jobs.close()


# Programs in which rank 1 ends: text that the other ranks' errors have, exit code of rank 1, seconds.
ONE_ENDS: dict[str, tuple[str, int, float]] = {
    "uncaught": ("ValueError: bad batch (ends.py:", 1, TOLD_S),
    "uncaught_in_thread": ("ValueError: bad shard of the data set (ends.py:", 1, TOLD_S),
    "exits_with_3": ("sys.exit(3)", 3, TOLD_S),
    "raises_system_exit": ("rank 1", 3, LOST_S),
    "leaves_a_with_block": ("ValueError: bad batch (ends.py:", 1, TOLD_S),
    "killed": ("rank 1", -9, LOST_S),
    "killed_with_python": ("rank 1", -9, LOST_S),
    "ends_early": ("rank 1 has left: its World is closed", 1, LOST_S),  # told while it waits
    "saves_alone": ("waits in any_of of save_checkpoint", 1, LOST_S),
    "another_size": ("rank 1 of 3 ranks, expected one of 2", 1, TOLD_S),
}
GOOD_ENDS = (
    "trains_with_workers",
    "forks",
    "closes_twice",
    "joins_process_group",
    "lets_python_run",
    "leaves_the_host_alone",
)
SPAWNS = [("fork", ""), ("fork", "at once"), ("fork", "late"), ("spawn", "at once"), ("spawn", "late")]


@pytest.mark.parametrize("program", list(ONE_ENDS))
def test_all_end_after_one_and_name_it(jobs: Jobs, program: str) -> None:
    """The calls of the others raise tessera.Error with the words of rank 1, and their `finally` runs."""
    words, code, seconds = ONE_ENDS[program]
    job = jobs.ended(program)
    assert job.codes[1] == code, job.shown()
    assert job.told_after(1) < seconds, job.shown()
    assert job.seconds_after(1) < LOST_S, job.shown()
    if words.startswith("ValueError"):
        assert "Traceback" in job.err[1], job.shown()
        assert words.split(" (")[0] in job.err[1], job.shown()
    for rank in set(job.codes) - {1}:
        assert job.codes[rank] == 1, job.shown()
        assert job.has(rank, "finally_ran"), job.shown()
        error = next(line for line in job.said[rank] if "error" in line)
        assert error["kind"] == "comm", job.shown()
        assert "rank 1" in error["error"], job.shown()
        assert words in error["error"], job.shown()
        assert "rank 1" in job.err[rank], job.shown()


@pytest.mark.parametrize("key", ["rank 0", "rank 0 killed"])
def test_all_end_after_rank_0_which_serves_the_store(jobs: Jobs, key: str) -> None:
    """The same where the rank that ends takes the store with it."""
    job = jobs.ended(key)
    assert job.told_after(0) < (TOLD_S if key == "rank 0" else LOST_S), job.shown()
    assert job.seconds_after(0) < LOST_S, job.shown()
    for rank in set(job.codes) - {0}:
        assert job.codes[rank] == 1, job.shown()
        assert job.has(rank, "finally_ran"), job.shown()
        words = "ValueError: bad batch" if key == "rank 0" else "rank 0"
        assert words in job.err[rank], job.shown()


def test_a_rank_that_is_done_ends_when_another_one_fails_late(jobs: Jobs) -> None:
    """The World of rank 0 closes at the end of its script, and waits for the others no longer than they live."""
    job = jobs.ended("fails_while_others_are_done")
    assert job.codes[1] == 1, job.shown()
    assert "ValueError: found too late" in job.err[1], job.shown()
    assert job.codes[0] == 1, job.shown()
    assert "ValueError: found too late" in job.err[0], job.shown()
    assert job.seconds_after(1) < LOST_S, job.shown()


def test_ctrl_c_is_seen_in_waits_and_the_world_recovers(jobs: Jobs) -> None:
    """KeyboardInterrupt reaches `except` in a barrier, a forward and a backward in 0.3 s; the next step is right."""
    job = jobs.ended("interrupted")
    assert job.codes == {0: 0, 1: 0}, job.shown()
    sent = [line["at"] for line in job.said[0] if "sent" in line]
    seen = [line["at"] for line in job.said[0] if "interrupted" in line]
    assert len(sent) == len(seen) == 3, job.shown()
    waits = [after - before for before, after in zip(sent, seen, strict=True)]
    assert statistics.median(waits) < 0.3, job.shown()  # the machine has other work, too
    assert max(waits) < 0.6, job.shown()
    assert all(job.has(rank, "done") for rank in (0, 1)), job.shown()


def test_ctrl_c_that_is_not_caught_ends_all(jobs: Jobs) -> None:
    """KeyboardInterrupt is an exception as others are: rank 0 has its name."""
    job = jobs.ended("interrupted_to_its_end")
    assert job.codes[1] in (-2, 1, 130), job.shown()
    assert "KeyboardInterrupt" in job.err[1], job.shown()
    assert job.codes[0] == 1, job.shown()
    assert "rank 1" in job.err[0], job.shown()
    assert "nterrupt" in job.err[0], job.shown()


@pytest.mark.parametrize("key", [*GOOD_ENDS, "alone", "spawn fork "])
def test_good_ends_print_nothing(jobs: Jobs, key: str) -> None:
    """Exit code 0, and stderr has no word: with forked workers, with a forked child, closed twice, over a group."""
    job = jobs.ended(key)
    assert set(job.codes.values()) == {0}, job.shown()
    assert all(job.said[rank] for rank in job.codes), job.shown()
    assert not any(job.err.values()), job.shown()


def test_import_and_init_leave_the_host_program_alone(jobs: Jobs) -> None:
    """Signal handlers, logging, filters of warnings, streams, threads and variables stay; hooks only until close()."""
    job = jobs.ended("leaves_the_host_alone")
    for rank in (0, 1):
        (line,) = job.said[rank]
        assert (line["by_import"], line["by_init"], line["by_close"]) == ([], ["hooks"], []), job.shown()


def test_python_runs_on_while_init_and_close_wait(jobs: Jobs) -> None:
    """As test_gil.py, of the two calls that a process makes once."""
    job = jobs.ended("lets_python_run")
    waits = [line for line in job.said[0] if "waited" in line]
    assert len(waits) == 2, job.shown()
    assert all(line["waited"] > 0.25 and line["longest"] < 0.25 for line in waits), job.shown()


def test_closed_world_refuses_by_name(jobs: Jobs) -> None:
    """After close() each call that communicates is an error of kind "usage"."""
    for key in ("closes_twice", "alone"):
        job = jobs.ended(key)
        for rank in job.codes:
            refused = [line for line in job.said[rank] if "refused" in line]
            assert [line["refused"] for line in refused] == ["usage"] * 3, job.shown()
            assert all("closed" in line["text"] for line in refused), job.shown()


def test_child_of_fork_does_nothing_to_the_world(jobs: Jobs) -> None:
    """It has no World, drops its copies and ends with 0."""
    job = jobs.ended("forks")
    for rank in (0, 1):
        assert next(line["child"] for line in job.said[rank] if "child" in line) == 0, job.shown()
        assert next(line["in_child"] for line in job.said[rank] if "in_child" in line) == "usage", job.shown()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_exception_in_a_process_of_multiprocessing_ends_the_others(jobs: Jobs, method: str) -> None:
    """mp.spawn catches exceptions and leaves by sys.exit: the error of rank 0 has the text of rank 1 all the same."""
    job = jobs.ended(f"spawn {method} at once")
    errors = [line["error"] for line in job.said[0] if "error" in line]
    assert len(errors) == 1, job.shown()
    assert "rank 1" in errors[0], job.shown()
    assert "ValueError: bad batch (ends.py:" in errors[0], job.shown()
    assert any("raised" in line for line in job.said[0]), job.shown()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_process_of_multiprocessing_that_is_done_fails_when_another_one_fails_late(jobs: Jobs, method: str) -> None:
    """The error of its last close is on its stderr, and its exit code is not 0."""
    job = jobs.ended(f"spawn {method} late")
    assert any("done" in line for line in job.said[0]), job.shown()
    codes = next(line["exit_codes"] for line in job.said[0] if "exit_codes" in line)
    assert codes == [1, 1], job.shown()
    assert "rank 0 was done, then:" in job.err[0], job.shown()
    assert "ValueError: bad batch" in job.err[0], job.shown()


@pytest.mark.parametrize("seed", range(DRAWN))
def test_drawn_ends(jobs: Jobs, seed: int) -> None:
    """A rank that a seed draws ends in a drawn way at a drawn place: all end in 10 s, and the others name it."""
    size, who = drawn_job(seed)
    job = jobs.ended(f"drawn {seed}")
    assert len(job.codes) == size, job.shown()
    assert "killed" not in job.codes.values(), job.shown()
    assert job.seconds_after(who) < LOST_S, job.shown()
    for rank in set(range(size)) - {who}:
        assert job.has(rank, "finally_ran"), job.shown()
        assert job.codes[rank] == 1, job.shown()
        assert f"rank {who}" in job.err[rank], job.shown()


@pytest.mark.parametrize("seed", range(ORDERS))
def test_objects_die_in_any_order(jobs: Jobs, seed: int) -> None:
    """World, modules, optimizer, shards and a graph are dropped in a drawn order, some by the interpreter's end."""
    job = jobs.ended(f"order {seed}")
    assert set(job.codes.values()) == {0}, job.shown()
    assert all(job.has(rank, "done") for rank in job.codes), job.shown()
    assert not any(job.err.values()), job.shown()


def test_scripts_that_are_started_end_as_forked_ones(tmp_path: pathlib.Path) -> None:
    """The same for two interpreters of their own: the text of rank 1 on its stderr, its name on that of rank 0."""
    import socket

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    job = json.dumps({"program": "uncaught", "who": 1, "folder": str(tmp_path)})
    started = []
    for rank in range(2):
        own = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, **{key: str(value) for key, value in own.items()}, "PYTHONPATH": PACKAGE}
        started.append(
            subprocess.Popen(
                [sys.executable, str(HERE / "ends.py"), job], env=environment, stderr=subprocess.PIPE, text=True
            )
        )
    errors = [process.communicate(timeout=60)[1] for process in started]
    assert [process.returncode for process in started] == [1, 1], errors
    assert "ValueError: bad batch" in errors[1], errors
    assert "rank 1" in errors[0], errors
    assert "bad batch" in errors[0], errors
