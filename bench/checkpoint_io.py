#!/usr/bin/env python3
"""Saving and loading 400 MB of parameters: Tessera beside Python safetensors and
torch.distributed.checkpoint.

    .venv/bin/python bench/checkpoint_io.py [--rounds 5] [--folder DIR]

Each round runs all of them once, each in processes of its own (one save and one load to warm up,
then the one that counts), in the same folder. 100 matrices [1000, 1000] in fp32, 2 ranks x 1 thread
where there are ranks. What each does:

- tessera: each rank copies its half, writes, hashes and fsyncs it; manifest, rename. Load: verifies
  every byte, then fills the shards.
- safetensors: save_file of the whole in one process, then fsync (save_file alone is shown too);
  load_file, then a copy into the parameters (load_file alone only maps the file).
- dcp: torch.distributed.checkpoint of DTensors on 2 Gloo ranks; its writer calls fsync, its reader
  fills the same DTensors and verifies nothing.

All files are in the page cache when they are loaded. Prints medians in ms and the ratios by round.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import local_ranks

ROOT = pathlib.Path(__file__).resolve().parent.parent
MATRICES, SIDE = 100, 1000
MEGABYTES = MATRICES * SIDE * SIDE * 4 / 1e6
WARM_UP = 1


def timed(action):
    start = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - start)


def whole_state():
    import torch
    return {f"layers.{i // 4}.weight_{i % 4}": torch.full((SIDE, SIDE), 1.0 / (1 + i))
            for i in range(MATRICES)}


def measure_safetensors(arguments):
    import torch
    from safetensors.torch import load_file, save_file
    torch.set_num_threads(1)
    state = whole_state()
    path = os.path.join(arguments.folder, "model.safetensors")

    def sync():
        with open(path, "rb+") as file:
            os.fsync(file.fileno())

    def load():
        for name, value in load_file(path).items():
            state[name].copy_(value)

    for _ in range(WARM_UP + 1):
        if os.path.exists(path):
            os.remove(path)
        write = timed(lambda: save_file(state, path))
        result = {"save": write + timed(sync), "save without fsync": write, "load": timed(load),
                  "load_file alone": timed(lambda: load_file(path))}
    return result


def measure_dcp(arguments):
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    local_ranks.join(arguments)
    mesh = init_device_mesh("cpu", (arguments.ranks,))
    state = {name: distribute_tensor(value, mesh, [Shard(0)])
             for name, value in whole_state().items()}
    folder = os.path.join(arguments.folder, "dcp")

    def together(action):
        def run():
            action()
            dist.barrier()
        dist.barrier()
        return timed(run)

    for _ in range(WARM_UP + 1):
        if arguments.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        result = {"save": together(lambda: dcp.save(state, checkpoint_id=folder)),
                  "load": together(lambda: dcp.load(state, checkpoint_id=folder))}
    local_ranks.report(arguments, result)


def run_tessera(folder):
    command = [ROOT / "build/release/bench/checkpoint_io", os.path.join(folder, "tessera"),
               str(WARM_UP + 1), "2"]
    done = subprocess.run(command, check=True, capture_output=True, text=True,
                          env=local_ranks.quiet_environment(), stdin=subprocess.DEVNULL)
    return json.loads(done.stdout.splitlines()[-1])


def run_safetensors(folder):
    command = [sys.executable, __file__, "--side", "safetensors", "--folder", folder]
    done = subprocess.run(command, check=True, capture_output=True, text=True,
                          env=local_ranks.quiet_environment(), stdin=subprocess.DEVNULL)
    return json.loads(done.stdout.splitlines()[-1])


def run_dcp(folder):
    return local_ranks.run_ranks(__file__, ["--side", "dcp", "--folder", folder])[0]


def compare(arguments):
    sides = {"tessera": run_tessera, "safetensors": run_safetensors, "dcp": run_dcp}
    rounds = {side: [] for side in sides}
    for number in range(1, arguments.rounds + 1):
        for side, run in sides.items():
            folder = tempfile.mkdtemp(dir=arguments.folder)
            try:
                rounds[side].append(run(folder))
            finally:
                shutil.rmtree(folder)
            shown = ", ".join(f"{key} {value:.0f}" for key, value in rounds[side][-1].items())
            print(f"round {number} {side}: {shown} ms", flush=True)
    print(f"\n{MEGABYTES:.0f} MB, medians of {arguments.rounds} rounds; GB/s; how much faster "
          "Tessera is, by round")
    for what in ("save", "load"):
        ours = [one[what] for one in rounds["tessera"]]
        for side in sides:
            theirs = [one[what] for one in rounds[side]]
            middle = statistics.median(theirs)
            ratios = ", ".join(f"{b / a:.2f}" for a, b in zip(ours, theirs))
            print(f"  {what} {side:12} {middle:6.0f} ms  {MEGABYTES / middle:5.2f} GB/s  {ratios}")
    copies = statistics.median(one["copy"] for one in rounds["tessera"])
    print(f"  a step waits for the copy alone: {copies:.0f} ms")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where to write; default: build/bench, on the disk of this tree")
    parser.add_argument("--side", choices=["safetensors", "dcp"], help=argparse.SUPPRESS)
    local_ranks.add_rank_arguments(parser)
    arguments = parser.parse_args()
    if arguments.side == "safetensors":
        print(json.dumps(measure_safetensors(arguments)))
    elif arguments.side == "dcp":
        if arguments.rank is None:
            raise SystemExit("--side dcp is started by this script itself")
        measure_dcp(arguments)
    else:
        arguments.folder = arguments.folder or str(ROOT / "build/bench")
        os.makedirs(arguments.folder, exist_ok=True)
        compare(arguments)


if __name__ == "__main__":
    main()
