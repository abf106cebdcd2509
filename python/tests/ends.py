"""Programs that end in many ways, for test_ends.py.

`python ends.py` reads jobs as lines of JSON from stdin, and forks a process for each rank of a job, so that one import
of torch serves all. An error of its program reaches the interpreter, as after `python script.py`. Each rank writes
stdout and stderr into files of the job's folder; at the job's end its exit codes and seconds are a line of JSON.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import select
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # fully_shard would import it in each rank
import torch.distributed as dist
from torch import nn


def host_state() -> dict[str, str]:
    """What belongs to the program that imports us."""
    return {
        "signals": str([str(signal.getsignal(number)) for number in sorted(signal.valid_signals())]),
        "logging": str(
            (logging.root.handlers, logging.root.level, logging.root.filters, sorted(logging.root.manager.loggerDict))
        ),
        "warnings": str(warnings.filters),
        "streams": str((sys.stdout, sys.stderr, sys.displayhook)),
        "threads": str(torch.get_num_threads()),
        "dtype": str(torch.get_default_dtype()),
        "variables": str(sorted(os.environ.items())),
        "hooks": str((sys.excepthook, threading.excepthook, sys.exit, sys.unraisablehook)),
    }


torch.set_num_threads(1)
BEFORE_IMPORT = host_state()

import tessera  # noqa: E402
from tessera import fully_shard  # noqa: E402 (the first use of a name is the import)

AFTER_IMPORT = host_state()

AT_ONCE = 8  # processes; they wait most of the time
WAIT_S = 30.0  # "for ever", as far as a test goes

job: dict[str, Any] = {}
rank = -1


def say(**values: Any) -> None:
    """Appends a line for the test, which is on the disk before anything else happens."""
    with open(os.path.join(job["folder"], f"said.{rank}"), "a") as file:
        file.write(json.dumps({"at": time.time(), **values}) + "\n")


def model_of(layers: int = 2) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)])


def sharded(layers: int = 2) -> nn.Module:
    model = model_of(layers)
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    loss = model(torch.ones(2, 8)).square().mean()
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def train_for_ever(model: nn.Module) -> None:
    """Until an error ends it, which this rank's program passes on. Says that `finally` has run."""
    ends = time.time() + WAIT_S
    try:
        while time.time() < ends:
            step(model)
            time.sleep(0.01)
    except tessera.Error as error:
        say(error=str(error), kind=error.kind)
        raise
    except RuntimeError as error:  # what leaves a backward has torch's class
        say(error=str(error), kind="comm")
        raise
    finally:
        say(finally_ran=True)


# One rank ends, the others work on. `who` is the rank that ends.


def one_ends(end: Callable[[], object]) -> None:
    """`who` calls `end` after a step, the others train."""
    model = sharded()
    if rank == job["who"]:
        step(model)
        say(ends=True)
        end()
    train_for_ever(model)


def fail() -> None:
    raise ValueError("bad batch")


def leave() -> None:
    raise SystemExit(3)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def uncaught() -> None:
    tessera.init()
    one_ends(fail)


def uncaught_in_thread() -> None:
    tessera.init()
    model = sharded()

    def work() -> None:
        time.sleep(0.2)
        say(ends=True)
        raise ValueError("bad shard of the data set")

    if rank == job["who"]:
        threading.Thread(target=work).start()
    train_for_ever(model)


def exits_with_3() -> None:
    tessera.init()
    one_ends(lambda: sys.exit(3))


def raises_system_exit() -> None:
    tessera.init()
    one_ends(leave)


def killed() -> None:
    tessera.init()
    one_ends(kill)


def killed_with_python() -> None:
    """The others compute in Python meanwhile: their next call tells, and nothing ends them before."""
    tessera.init()
    model = sharded()
    step(model)
    if rank == job["who"]:
        say(ends=True)
        kill()
    ends = time.time() + 1.5
    while time.time() < ends:
        time.sleep(0.01)
    train_for_ever(model)


def ends_early() -> None:
    """The script of one rank is done, by mistake, while the others wait for it."""
    tessera.init()
    model = sharded()
    step(model)
    if rank == job["who"]:
        say(ends=True)
        return
    train_for_ever(model)


def fails_while_others_are_done() -> None:
    tessera.init()
    model = sharded()
    step(model)
    if rank == job["who"]:
        time.sleep(0.5)
        say(ends=True)
        raise ValueError("found too late")


def leaves_a_with_block() -> None:
    with tessera.init():
        one_ends(fail)


def saves_alone() -> None:
    """One rank alone calls what all have to call, and what no call before has opened a group for."""
    tessera.init()
    model = sharded()
    optimizer = tessera.SGD(model)
    step(model, optimizer)
    if rank == job["who"]:
        say(ends=True)
        tessera.save_checkpoint(model, optimizer, os.path.join(job["folder"], "saved"), step=1)
    train_for_ever(model)


def another_size() -> None:
    """One rank was started with another number of ranks: the others wait for it in init()."""
    if rank == job["who"]:
        time.sleep(0.5)
        say(ends=True)
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = "3"
    try:
        tessera.init()
    except tessera.Error as error:
        say(error=str(error), kind=error.kind, finally_ran=True)
        raise


def drawn() -> None:
    """One rank ends in a way and at a place that the seed draws."""
    draw = random.Random(job["seed"])
    who = draw.randrange(job["size"])
    how = draw.choice(["kill", "raise", "thread", "exit", "stop script", "terminate"])
    where = draw.choice(["before", "forward", "backward", "hook", "optimizer", "between", "state"])
    steps = draw.randrange(3)
    tessera.init()
    model = sharded(draw.choice([1, 2, 3]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert job["who"] == who

    def end() -> None:
        say(ends=True, how=how, where=where)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(WAIT_S)
        if how == "exit":
            sys.exit(4)
        if how == "stop script":
            raise SystemExit
        if how == "thread":
            thread = threading.Thread(target=fail)
            thread.start()
            thread.join()
            return
        fail()

    def fail() -> None:
        raise ValueError("drawn failure")

    class Ends(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            end()
            return gradient

    try:
        for _ in range(steps):
            step(model, optimizer)
        if where == "state":
            for _ in tessera.full_parameters(model):
                if rank == who:
                    end()
        if rank == who:
            if where == "before":
                end()
            if where == "hook":
                model[0].register_forward_pre_hook(lambda *_: end())
            if where == "forward":
                model[-1].register_forward_hook(lambda *_: end())
            result = model(torch.ones(2, 8))
            if where == "between":
                end()
            if where == "backward":
                result = Ends.apply(result)
            result.square().mean().backward()
            if where == "optimizer":
                optimizer.register_step_pre_hook(lambda *_: end())
            optimizer.step()
            end()
        train_for_ever(model)
    finally:
        if rank != who:
            say(finally_ran=True)


# Ctrl-C.


def interrupted() -> None:
    """SIGINT while rank 0 waits for rank 1 in a barrier, a forward and a backward; then both continue."""
    world = tessera.init()
    model = sharded()
    step(model)

    def send() -> None:
        time.sleep(0.3)
        say(sent=True)
        os.kill(os.getpid(), signal.SIGINT)

    def wait_in(what: str) -> None:
        loss = model(torch.ones(2, 8)).square().mean() if what == "backward" else None
        if rank == 1:
            time.sleep(0.6)
        else:
            threading.Thread(target=send).start()
        try:
            if what == "barrier":
                world.barrier()
            elif what == "forward":
                model(torch.ones(2, 8))
            elif loss is not None:
                loss.backward()
        except KeyboardInterrupt:
            say(interrupted=what)
        except (tessera.Error, RuntimeError) as error:
            say(told=str(error), what=what)
        world.recover()

    for what in ("barrier", "forward", "backward"):
        wait_in(what)
        model.zero_grad()
        step(model)
    say(done=True)


def interrupted_to_its_end() -> None:
    """Ctrl-C that is not caught: a traceback, exit code 130 or 1, and the others are told."""
    world = tessera.init()
    if rank == job["who"]:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        world.barrier()
    train_for_ever(sharded())


# Processes that end well.


def trains_with_workers() -> None:
    """Forked workers of a DataLoader after the World and the units are there."""
    tessera.init()
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(12, 8))
    for _ in range(2):
        for (batch,) in torch.utils.data.DataLoader(data, batch_size=4, num_workers=2):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    say(done=True)


def forks() -> None:
    """A child of fork() that has everything, drops it and ends as a script does; its parent continues."""
    global model_in_child
    world = tessera.init()
    model_in_child = sharded()
    step(model_in_child)
    child = os.fork()
    if child == 0:
        try:
            tessera.world()
        except tessera.Error as error:
            say(in_child=error.kind)
        del model_in_child, world
        gc.collect()
        return
    _, status = os.waitpid(child, 0)
    say(child=os.waitstatus_to_exitcode(status))
    step(model_in_child)
    say(done=True)


def closes_twice() -> None:
    world = tessera.init()
    model = sharded()
    step(model)
    world.close()
    world.close()
    assert world.closed
    assert sys.excepthook is sys.__excepthook__
    for call in (world.barrier, tessera.world, lambda: model(torch.ones(2, 8))):
        try:
            call()
        except tessera.Error as error:
            say(refused=error.kind, text=str(error))
    say(done=True)


def lets_python_run() -> None:
    """Rank 1 comes half a second late to init() and to close(), while a Python thread of rank 0 ticks."""

    def call(act: Callable[[], Any]) -> Any:
        if rank == 1:
            time.sleep(0.5)
            return act()
        gaps = []
        over = threading.Event()

        def tick() -> None:
            last = time.monotonic()
            while not over.wait(0.005):
                gaps.append(time.monotonic() - last)
                last = time.monotonic()

        thread = threading.Thread(target=tick)
        thread.start()
        began = time.monotonic()
        result = act()
        waited = time.monotonic() - began
        over.set()
        thread.join()
        say(waited=waited, longest=max(gaps))
        return result

    world = call(tessera.init)
    call(world.close)
    say(done=True)


def leaves_the_host_alone() -> None:
    """Nothing of the host program is changed by the import and by init(), but the hooks of exceptions until close()."""
    before = host_state()
    world = tessera.init()
    model = sharded()
    step(model)
    inside = host_state()
    world.close()
    say(
        by_import=[key for key in BEFORE_IMPORT if AFTER_IMPORT[key] != BEFORE_IMPORT[key]],
        by_init=[key for key in before if inside[key] != before[key]],
        by_close=[key for key in before if host_state()[key] != before[key]],
    )


def dies_in_order() -> None:
    """Names that the seed orders: some are dropped by the program, the others by the end of the interpreter."""
    draw = random.Random(job["seed"])
    world = tessera.init()
    model = sharded()
    optimizer = draw.choice([torch.optim.AdamW, torch.optim.SGD, tessera.AdamW])
    made = optimizer(model if optimizer is tessera.AdamW else model.parameters(), lr=0.1)
    step(model, made)
    loss = model(torch.ones(2, 8)).sum()
    named: dict[str, Any] = {
        "world_": world,
        "model_": model,
        "layer_": model[0],
        "optimizer_": made,
        "shards_": list(model.parameters()),
        "contract_": model.contract(),
        "loss_": loss,
        "mesh_": tessera.Mesh(),
    }
    loss.backward()
    names = draw.sample(sorted(named), len(named))
    for name in names:
        globals()[name] = named[name]
    del world, model, made, loss, named
    for name in names[: draw.randrange(len(names) + 1)]:
        del globals()[name]
        if draw.random() < 0.5:
            gc.collect()
    say(done=True)


def _work(index: int, folder: str, fails: str) -> None:
    global rank
    rank = index
    job["folder"] = folder
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=index, world_size=2)
    world = tessera.init()
    assert (world.rank, world.size) == (index, 2)
    model = sharded()
    step(model)
    if fails == "late" and index == 1:
        time.sleep(0.5)
    if fails and index == 1:
        fail()
    if fails == "at once":
        train_for_ever(model)
    say(done=True)


def spawns() -> None:
    """torch.multiprocessing.spawn over a file store, without a variable of a launcher; processes of fork or spawn."""
    import torch.multiprocessing as mp

    context = mp.start_processes(
        _work, (job["folder"], job["fails"]), nprocs=2, join=False, start_method=job["start_method"]
    )
    for process in context.processes:  # join() would end the others at once when one has failed
        process.join()
    say(exit_codes=[process.exitcode for process in context.processes])
    try:
        context.join()
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        say(raised=str(error))


def joins_process_group() -> None:
    """Under a launcher's variables and an initialised torch.distributed; both are used afterwards, and joined twice."""
    dist.init_process_group("gloo")
    for _ in range(2):
        world = tessera.init()
        model = sharded()
        step(model)
        dist.barrier()
        world.close()
    dist.destroy_process_group()
    say(done=True)


PROGRAMS: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (
        uncaught,
        uncaught_in_thread,
        exits_with_3,
        raises_system_exit,
        killed,
        killed_with_python,
        ends_early,
        fails_while_others_are_done,
        leaves_a_with_block,
        saves_alone,
        another_size,
        drawn,
        interrupted,
        interrupted_to_its_end,
        trains_with_workers,
        forks,
        closes_twice,
        lets_python_run,
        leaves_the_host_alone,
        dies_in_order,
        spawns,
        joins_process_group,
    )
}


class Server:
    """Starts the ranks of jobs, and reports them."""

    def __init__(self) -> None:
        self.waiting: list[dict[str, Any]] = []
        self.running: dict[int, tuple[int, int]] = {}  # pid: job, rank
        self.jobs: dict[int, dict[str, Any]] = {}
        self.text = b""
        self.ended = False

    def read(self, patience: float) -> None:
        if self.ended:
            time.sleep(patience)
            return
        if not select.select([0], [], [], patience)[0]:
            return
        found = os.read(0, 65536)
        self.ended = not found
        self.text += found
        *lines, self.text = self.text.split(b"\n")
        self.waiting += [json.loads(line) for line in lines]

    def start(self) -> bool:
        """Whether this process is a rank now."""
        global job, rank
        while self.waiting and (not self.running or len(self.running) + self.waiting[0]["size"] <= AT_ONCE):
            one = self.waiting.pop(0)
            with socket.socket() as bound:
                bound.bind(("127.0.0.1", 0))
                port = bound.getsockname()[1]
            self.jobs[one["number"]] = {**one, "began": time.time(), "codes": {}, "seconds": {}}
            for each in range(one["size"]):
                pid = os.fork()
                if pid == 0:
                    job, rank = one, each
                    become_rank(port)
                    return True
                self.running[pid] = (one["number"], each)
        return False

    def reap(self) -> None:
        for pid in list(self.running):
            number, each = self.running[pid]
            one = self.jobs[number]
            late = time.time() - one["began"] > one["limit"]
            if late:
                os.kill(pid, signal.SIGKILL)
            found, status = os.waitpid(pid, 0 if late else os.WNOHANG)
            if not found:
                continue
            del self.running[pid]
            one["codes"][each] = "killed" if late else os.waitstatus_to_exitcode(status)
            one["seconds"][each] = time.time() - one["began"]
            if len(one["codes"]) == one["size"]:
                print(json.dumps(self.jobs.pop(number)), flush=True)

    def serve(self) -> bool:
        """Returns in each rank with True, and with False when there is nothing more to do."""
        gc.collect()
        gc.freeze()  # a rank that ends looks at what is its own, not at all of torch
        while not (self.ended and not self.waiting and not self.running):
            self.read(0.01)
            if self.start():
                return True
            self.reap()
        return False


def become_rank(port: int) -> None:
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for descriptor, name in ((1, "out"), (2, "err")):
        file = os.open(os.path.join(job["folder"], f"{name}.{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
    if job.get("launched", True):
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(job["size"]),
            LOCAL_WORLD_SIZE=str(job["size"]),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )


if __name__ == "__main__":
    if len(sys.argv) > 1:  # one rank, started with a launcher's variables
        job = json.loads(sys.argv[1])
        rank = int(os.environ["RANK"])
        PROGRAMS[job["program"]]()
    elif Server().serve():
        PROGRAMS[job["program"]]()
