"""Starts a Python script or function once a rank on this machine and collects what each rank returns.

Both sides of a comparison get the same surroundings from `quiet_environment`: one thread a rank and
an allocator that keeps its pages (fresh pages cost several times warm ones; untuned, PyTorch's side
would lose about a tenth).
"""

import collections
import datetime
import json
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time

LAST_LINES = 10  # of the stderr of a rank that fails


def quiet_environment(threads=1):
    keep = str(1 << 30)
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads),
            "MALLOC_MMAP_THRESHOLD_": keep, "MALLOC_TRIM_THRESHOLD_": keep,
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1"}


class _Rank:
    """A process whose stderr is copied to ours, line by line, and whose last lines are kept."""

    def __init__(self, command, environment):
        self.last = collections.deque(maxlen=LAST_LINES)
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                        text=True, errors="replace")
        self._reader = threading.Thread(target=self._pass_on, daemon=True)
        self._reader.start()

    def _pass_on(self):
        for line in self.process.stderr:
            self.last.append(line.rstrip())
            sys.stderr.write(line)
            sys.stderr.flush()

    def wait(self):
        code = self.process.wait()
        self._reader.join(10)  # longer only where a child of the rank's holds the pipe
        return code


def _how_it_ended(number, rank, code, has_reported):
    names = {-each: f" ({each.name})" for each in signal.Signals}
    lines = list(rank.last)
    return "\n".join([f"rank {number} ended with {code}{names.get(code, '')} "
                      f"{'after' if has_reported else 'before'} it had reported, "
                      f"{'the last lines of its stderr:' if lines else 'nothing on stderr'}",
                      *(f"    {line}" for line in lines)])


def run_ranks(script, arguments, ranks=2, python=sys.executable, environment=None, what=""):
    """Runs `script --rank R --ranks N --meet DIR arguments...`; returns each rank's result. `python` is the
    interpreter, `environment` takes the place of the quiet one. Where a rank ends with another code than 0, SystemExit
    says `what` was run, and how each rank has ended."""
    with tempfile.TemporaryDirectory() as meet:
        command = [str(python), script, *map(str, arguments), "--ranks", str(ranks), "--meet", meet]
        started = [_Rank([*command, "--rank", str(rank)], environment or quiet_environment()) for rank in range(ranks)]
        codes = [rank.wait() for rank in started]
        results = [pathlib.Path(meet, f"rank_{rank}.json") for rank in range(ranks)]
        if any(codes):
            raise SystemExit("\n".join([
                f"{os.path.basename(script)}{f', {what}' if what else ''}: ranks ended with {codes}",
                *(_how_it_ended(number, rank, code, result.exists())
                  for number, (rank, code, result) in enumerate(zip(started, codes, results)))]))
        return [json.loads(result.read_text()) for result in results]


def add_rank_arguments(parser):
    parser.add_argument("--rank", type=int, help="set by the launcher")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--meet", help="set by the launcher: folder where the ranks meet")


def join(arguments):
    """Makes this process one rank of a Gloo group."""
    import torch
    import torch.distributed as dist
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{arguments.meet}/store",
                            rank=arguments.rank, world_size=arguments.ranks)


def leave(arguments):
    """Ends a rank of PyTorch's side that has reported, without Python's finalization.

    A thread of PyTorch's Gloo group lets go of a collective's tensors after the wait for it has ended. Where it does so
    a few milliseconds late, on a busy machine, and something like FSDP2 keeps the group beyond destroy_process_group(),
    it asks for the GIL as Python finalizes, and the process ends by "terminate called without an active exception"
    (pytorch/pytorch issue 190489; seen with 2.13 and 2.15).
    """
    import torch.distributed as dist
    dist.destroy_process_group()
    # A socket that closes takes along what the other rank has not read.
    pathlib.Path(arguments.meet, f"left_{arguments.rank}").touch()
    end = time.monotonic() + 10
    while len(list(pathlib.Path(arguments.meet).glob("left_*"))) < arguments.ranks and time.monotonic() < end:
        time.sleep(0.01)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def report(arguments, result):
    pathlib.Path(arguments.meet, f"rank_{arguments.rank}.json").write_text(json.dumps(result))


def ask_ranks(function, arguments, ranks, seconds=60):
    """Runs `function(rank, say, *arguments)` on Gloo ranks; returns the lines that they said.

    A collective gives up after half of `seconds`, which begin when every rank has its imports. What
    still runs after all of them is ended, and a line says which ranks hung.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as meet:
        ready = context.Barrier(ranks + 1)
        processes = [context.Process(target=_answer, args=(function, arguments, rank, ranks, meet, ready, seconds / 2))
                     for rank in range(ranks)]
        for process in processes:
            process.start()
        ready.wait(600)
        end = time.monotonic() + seconds
        for process in processes:
            process.join(max(0, end - time.monotonic()))
        hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for rank in hung:
            processes[rank].kill()
            processes[rank].join()
        said = pathlib.Path(meet, "answers")
        lines = said.read_text(encoding="utf-8").splitlines() if said.exists() else []
        return lines + [f"rank {rank} hung" for rank in hung]


def _answer(function, arguments, rank, ranks, meet, ready, seconds):
    import torch
    import torch.distributed as dist

    def say(text):
        with open(pathlib.Path(meet, "answers"), "a", encoding="utf-8") as out:
            out.write(text.replace("\n", " ")[:160] + "\n")

    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # PyTorch prints what it refuses, too
    ready.wait(600)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}/store", rank=rank, world_size=ranks,
                            timeout=datetime.timedelta(seconds=seconds))
    try:
        function(rank, say, *arguments)
    except BaseException as error:
        say(f"rank {rank}: {type(error).__name__}: {error}")
    os._exit(0)  # without waiting for ranks that hang
