"""Starts a Python script or function once a rank on this machine and collects what each rank returns.

Both sides of a comparison get the same surroundings from `quiet_environment`: one thread a rank and
an allocator that keeps its pages (fresh pages cost several times warm ones; untuned, PyTorch's side
would lose about a tenth).
"""

import datetime
import json
import multiprocessing
import os
import pathlib
import subprocess
import sys
import tempfile
import time


def quiet_environment(threads=1):
    keep = str(1 << 30)
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads),
            "MALLOC_MMAP_THRESHOLD_": keep, "MALLOC_TRIM_THRESHOLD_": keep,
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1"}


def run_ranks(script, arguments, ranks=2, python=sys.executable, environment=None):
    """Runs `script --rank R --ranks N --meet DIR arguments...`; returns each rank's result. `python` is the
    interpreter, `environment` takes the place of the quiet one."""
    with tempfile.TemporaryDirectory() as meet:
        command = [str(python), script, *map(str, arguments), "--ranks", str(ranks), "--meet", meet]
        processes = [subprocess.Popen([*command, "--rank", str(rank)], env=environment or quiet_environment(),
                                      stdin=subprocess.DEVNULL) for rank in range(ranks)]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(f"{os.path.basename(script)}: ranks ended with {codes}")
        return [json.loads(pathlib.Path(meet, f"rank_{rank}.json").read_text())
                for rank in range(ranks)]


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
