#!/usr/bin/env python3
"""Runs tests of the Python module on several ranks: one pytest a rank, the same tests in the same order, one World.

    python/tests/ranks.py [-n RANKS] [--timeout SECONDS] [pytest's arguments ...]

Every rank has torchrun's variables, and one thread. Rank 0's output is shown as it comes, another rank's where it
fails. A rank that fails a test stops all of them at this test: conftest.py tells the others. What has not ended after
SECONDS shows where it stands (its Python stacks), and is killed; with TESSERA_FULL=1 it has 20 times as long. Without
PYTHONPATH the package is that of build/release. -n 0 is one pytest without a launcher's variables, for tests that start
processes of their own.
"""

import argparse
import ctypes
import importlib.util
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO

ROOT = pathlib.Path(__file__).resolve().parents[2]
# A rank learns within seconds that another one has failed, and says so.
GRACE_S = 20.0
PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Asks the kernel to kill this process when the one that started it ends, however that ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def environment_of(rank: int, size: int, port: int) -> dict[str, str]:
    """Returns the variables that torchrun would set, over those of this process; for a size of 0 none of them."""
    threads = {"OMP_NUM_THREADS": 1, "TORCHINDUCTOR_COMPILE_THREADS": 1}
    launched = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RUN_ID": f"tests_{port}",
    }
    own = threads if size == 0 else threads | launched
    package = {"PYTHONPATH": os.environ.get("PYTHONPATH") or str(ROOT / "build/release/python")}
    return {**os.environ, **package, **{name: str(value) for name, value in own.items()}}


class Ranks:
    """The processes, each of which runs pytest, and what each of them has said."""

    def __init__(self, size: int, arguments: Sequence[str]) -> None:
        # A store in this process, as torchrun's agent has one: tests may call init_process_group() next to our World.
        # The port is bound before any rank starts, and no other process can take it; ranks import torch meanwhile.
        bound = socket.socket()
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        words = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", *arguments]
        self.outputs: list[IO[bytes] | None] = [None]
        self.outputs += [tempfile.TemporaryFile() for _ in range(size - 1)]  # noqa: SIM115
        self.processes = [
            subprocess.Popen(
                words,
                cwd=ROOT,
                env=environment_of(rank, size, port),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                preexec_fn=end_with_parent,
            )
            for rank, output in enumerate(self.outputs)
        ]
        if size == 0:
            return
        from torch.distributed import TCPStore

        self.store = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=bound.detach())

    def running(self) -> list[int]:
        """Returns the ranks whose processes have not ended."""
        return [rank for rank, process in enumerate(self.processes) if process.poll() is None]

    def wait(self, seconds: float) -> None:
        """Returns when all have ended, after `seconds`, or GRACE_S after the first one that has failed."""
        ends = time.monotonic() + seconds
        failed = False
        while self.running() and time.monotonic() < ends:
            if not failed and any(process.poll() for process in self.processes):
                failed = True
                ends = min(ends, time.monotonic() + GRACE_S)
            time.sleep(0.02)

    def kill(self) -> None:
        """Has those that are left write their stacks (faulthandler in conftest.py), then kills them."""
        left = self.running()
        for rank in left:
            self.processes[rank].send_signal(signal.SIGUSR1)
        if left:
            time.sleep(1.0)
        for rank in left:
            self.processes[rank].kill()
        for process in self.processes:
            process.wait()

    def show(self, rank: int) -> None:
        """Writes what a rank but 0 has said."""
        output = self.outputs[rank]
        if output is not None:
            output.seek(0)
            sys.stdout.write(f"\n----- rank {rank} -----\n{output.read().decode(errors='replace')}")
            sys.stdout.flush()


def outcome(codes: Mapping[int, int], killed: Sequence[int]) -> list[str]:
    """Returns a line for each rank that did not end with 0."""
    return [
        f"ranks: rank {rank} {'did not end, and was killed' if rank in killed else f'ended with exit code {code}'}"
        for rank, code in codes.items()
        if code != 0
    ]


def main() -> int:
    """Returns the exit code: 0 where all ranks end with 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=2, metavar="RANKS", dest="size")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS")
    known, arguments = parser.parse_known_args()
    own = ROOT / ".venv/bin/python"
    if importlib.util.find_spec("torch") is None and own.exists() and sys.prefix == sys.base_prefix:
        os.execv(own, [str(own), *sys.argv])
    seconds = known.timeout * (20 if os.environ.get("TESSERA_FULL") == "1" else 1)
    ranks = Ranks(known.size, arguments)
    killed: list[int] = []
    try:
        ranks.wait(seconds)
    except KeyboardInterrupt:
        ranks.wait(GRACE_S)  # the terminal has told the ranks, too
    finally:
        killed = ranks.running()
        ranks.kill()
    codes = {rank: process.returncode for rank, process in enumerate(ranks.processes)}
    for rank, code in codes.items():
        if code != 0:
            ranks.show(rank)
    lines = outcome(codes, killed)
    print(*lines, sep="\n", end="\n" if lines else "")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
