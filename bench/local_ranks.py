"""Starts a Python script once a rank on this machine and collects what each rank returns.

Both sides of a comparison get the same surroundings from `quiet_environment`: one thread a rank and
an allocator that keeps its pages (fresh pages cost several times warm ones; untuned, PyTorch's side
would lose about a tenth).
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile


def quiet_environment(threads=1):
    keep = str(1 << 30)
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads),
            "MALLOC_MMAP_THRESHOLD_": keep, "MALLOC_TRIM_THRESHOLD_": keep,
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1"}


def run_ranks(script, arguments, ranks=2):
    """Runs `script --rank R --ranks N --meet DIR arguments...`; returns each rank's result."""
    with tempfile.TemporaryDirectory() as meet:
        command = [sys.executable, script, *map(str, arguments), "--ranks", str(ranks), "--meet", meet]
        processes = [subprocess.Popen([*command, "--rank", str(rank)], env=quiet_environment(),
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
