#!/usr/bin/env python3
"""Saving and loading 400 MB of parameters: Tessera compared with Python safetensors and
torch.distributed.checkpoint.

    bench/checkpoint_io [--rounds 5] [--folder DIR] [--memory DIR]

100 matrices [1000, 1000] in fp32, 2 ranks x 1 thread where there are ranks. A round runs all of them
once, in turns, each in processes of its own (one save and load to warm up, then the one that
counts). What each does:

- tessera: each rank copies its half, then hashes, writes and fsyncs it; manifest, rename. "Without
  fsync" it is the same with fsync() made to do nothing. Load: verifies every byte and fills the
  shards. `hash` is what hashing alone takes of either; the others do not hash.
- safetensors: save_file of the whole in one process (it does not fsync; "with" has an fsync after
  it). Load: load_file, then a copy into the parameters (load_file alone only maps the file).
- dcp: torch.distributed.checkpoint of DTensors on 2 Gloo ranks. Its writer calls fsync, as by
  default; "without" is sync_files=False. Its reader fills the same DTensors, verifies nothing.

First in --folder, on a disk, then in --memory, a folder in memory (tmpfs). `load` is out of the page
cache, `cold load` after the files were dropped from it (in memory there is no such thing). Prints
medians and the fastest round in ms, GB/s and the ratios by round. On a machine that is not quiet
the sides with two ranks wait for the slower of two cores.
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

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))
import local_ranks  # noqa: E402

MATRICES, SIDE = 100, 1000
MEGABYTES = MATRICES * SIDE * SIDE * 4 / 1e6
WARM_UP = 1


def timed(action):
    start = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - start)


def sync_file(path):
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def drop_from_cache(folder):
    """Dirty pages stay where they are, so what was not yet synced is synced first."""
    for path in pathlib.Path(folder).rglob("*"):
        if path.is_file():
            sync_file(path)
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


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

    def load():
        for name, value in load_file(path).items():
            state[name].copy_(value)

    for _ in range(WARM_UP + 1):
        if os.path.exists(path):
            os.remove(path)
        os.sync()  # what removing leaves to do is not the next save's
        result = {"save": timed(lambda: save_file(state, path))}
        result["save and fsync"] = result["save"] + timed(lambda: sync_file(path))
        result["load"] = timed(load)
        drop_from_cache(arguments.folder)
        result["cold load"] = timed(load)
    return result


def measure_dcp(arguments):
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    local_ranks.join(arguments)
    mesh = init_device_mesh("cpu", (arguments.ranks,))
    state = {name: distribute_tensor(value, mesh, [Shard(0)])
             for name, value in whole_state().items()}
    folder = os.path.join(arguments.folder, "dcp")

    def on_first_rank(action):
        if arguments.rank == 0:
            action()
        dist.barrier()

    def together(action):
        def run():
            action()
            dist.barrier()
        dist.barrier()
        return timed(run)

    def remove():
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()

    def save(sync_files):
        on_first_rank(remove)
        writer = dcp.FileSystemWriter(folder, sync_files=sync_files)
        return together(lambda: dcp.save(state, storage_writer=writer))

    for _ in range(WARM_UP + 1):
        result = {"save": save(False), "save and fsync": save(True),
                  "load": together(lambda: dcp.load(state, checkpoint_id=folder))}
        on_first_rank(lambda: drop_from_cache(folder))
        result["cold load"] = together(lambda: dcp.load(state, checkpoint_id=folder))
    local_ranks.report(arguments, result)
    local_ranks.leave(arguments)


def output_of(command):
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, env=local_ranks.quiet_environment(), stdin=subprocess.DEVNULL)
    return json.loads(done.stdout.splitlines()[-1])


def run_tessera(folder):
    return output_of([ROOT / "build/release/bench/checkpoint_io", os.path.join(folder, "tessera"),
                      str(WARM_UP + 1), "2"])


def run_safetensors(folder):
    return output_of([sys.executable, __file__, "--side", "safetensors", "--folder", folder])


def run_dcp(folder):
    return local_ranks.run_ranks(__file__, ["--side", "dcp", "--folder", folder])[0]


SIDES = {"tessera": run_tessera, "safetensors": run_safetensors, "dcp": run_dcp}


def run_rounds(parent, rounds):
    found = {side: [] for side in SIDES}
    for number in range(1, rounds + 1):
        for side, run in SIDES.items():
            folder = tempfile.mkdtemp(dir=parent)
            try:
                found[side].append(run(folder))
            finally:
                shutil.rmtree(folder)
                os.sync()
            shown = ", ".join(f"{key} {value:.0f}" for key, value in found[side][-1].items())
            print(f"round {number} {side}: {shown} ms", file=sys.stderr, flush=True)
    return found


def print_rows(found, what, sides):
    """`sides`: label, side and what of it is compared with Tessera's `what`."""
    ours = [one[what] for one in found["tessera"]]
    for label, side, key in [("tessera", "tessera", what), *sides]:
        theirs = [one[key] for one in found[side]]
        middle = statistics.median(theirs)
        ratios = ", ".join(f"{b / a:.2f}" for a, b in zip(ours, theirs))
        print(f"  {label:12}{middle:6.0f} ms {MEGABYTES / middle:6.2f} GB/s, best {min(theirs):4.0f} ms"
              f"   x tessera: {ratios}")


def compare(where, parent, rounds, cold):
    found = run_rounds(parent, rounds)
    print(f"\n{where}: {MEGABYTES:.0f} MB, medians of {rounds} rounds")
    for what, says in [("save and fsync", "save, with fsync"), ("save", "save, without fsync")]:
        print(f" {says}")
        print_rows(found, what, [("safetensors", "safetensors", what), ("dcp", "dcp", what)])
    for what in ["load", "cold load"] if cold else ["load"]:
        print(f" {what}")
        print_rows(found, what, [("safetensors", "safetensors", what), ("dcp", "dcp", what)])
    for key, says in [("copy", "what a step waits for, the copy"), ("hash", "hashing alone")]:
        print(f" tessera: {says}: {statistics.median(one[key] for one in found['tessera']):.0f} ms")
    sys.stdout.flush()


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=str(ROOT / "build/bench"), help="on a disk")
    parser.add_argument("--memory", default="/dev/shm", help="in memory; \"\" leaves it out")
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
        os.makedirs(arguments.folder, exist_ok=True)
        compare("on disk", arguments.folder, arguments.rounds, cold=True)
        if arguments.memory:
            compare("in memory", arguments.memory, arguments.rounds, cold=False)


if __name__ == "__main__":
    main()
