"""The World of this process: how it begins, how it ends, and meshes over its ranks.

`init()` joins the other ranks once. From then on the World ends with the process: well where the script ends, and with
the text of the exception where one leaves it, so that the other ranks end, too. Nothing of the host program is changed
at import. Next: _module.py.
"""

from __future__ import annotations

import atexit
import datetime
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
import torch.distributed as dist

from tessera import _C

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Error = _C.Error
ReduceOp = Literal["sum", "max", "min"]

_MODEL_AXES = ("tp", "ep", "etp", "cp", "pp")
_ARGUMENTS = ("backend", "device", "timeout", "init_timeout", "group", "prefer")  # of init()
UNIT = "_tessera_unit"  # of a sharded module's __dict__
_LIBRARIES = tuple(os.path.dirname(file) + os.sep for file in (__file__, torch.__file__))


def usage_error(text: str) -> Error:
    """The error of a call that cannot be right, with kind "usage"."""
    error = Error(text)
    error.kind = "usage"
    return error


class World:
    """The ranks of a run, as one of them sees them. `init()` makes it; a context manager that closes it.

    FSDP2's counterpart is the default process group. An error of a collective, of kind "comm", can be caught on every
    rank; `recover()` makes the World usable again. A rank that is lost, or that an exception has ended, makes the calls
    of all others raise `tessera.Error` with its words.
    """

    def __init__(self, bound: _C.World) -> None:
        self._world = bound

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""
        return self._world.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._world.size

    @property
    def local_rank(self) -> int:
        """Number of this rank among those of its host."""
        return self._world.local_rank

    @property
    def backend(self) -> str:
        """ "gloo", "nccl", or "none" in a world of one."""
        return self._world.backend

    @property
    def device(self) -> torch.device:
        """Where the tensors of sharded modules and of collectives are."""
        return self._world.device

    @property
    def closed(self) -> bool:
        """Whether this rank has left the others: every call that communicates is refused."""
        return self._world.closed

    @property
    def aborted(self) -> bool:
        """Whether an error of this rank or of another one has ended all collectives; see `recover()`."""
        return self._world.aborted

    @property
    def recoveries(self) -> int:
        """How often `recover()` was called; the same on every rank."""
        return self._world.recoveries

    def recover(self) -> None:
        """Makes an aborted World usable again, after every rank has caught its error.

        Collective. Errors: "comm" where a rank does not come, and over NCCL.
        """
        self._world.recover()

    def barrier(self) -> None:
        """Returns when all ranks have called it. Collective. Errors: "comm"."""
        self._world.barrier()

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        """Combines `tensor` over all ranks in place, and returns it; every rank has the same bits.

        Shapes: any, the same on every rank; dense, on `device`; no gradient passes. Collective. Counterpart:
        torch.distributed.all_reduce. Errors: "usage" for a tensor that is not as above, "comm".
        """
        self._world.all_reduce(tensor, op)
        return tensor

    def close(self) -> None:
        """Leaves the others, once all of them are done. A second call does nothing.

        Collective. The end of the script calls it where the program has not. Counterpart:
        torch.distributed.destroy_process_group. Errors: "comm" where another rank has failed meanwhile.
        """
        try:
            self._world.close()
        finally:
            _process.left(self)

    def close_failed(self, why: str) -> None:
        """Leaves the others with the word `why`: their calls raise `tessera.Error` with it. Does not wait.

        An exception that ends the script, a Python thread or a process of `multiprocessing` calls it by itself. For
        programs that catch all exceptions and end the process by a way of their own (`os._exit`).
        """
        try:
            self._world.close_failed(why)
        finally:
            _process.left(self)

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or is_good_end(error):
            self.close()
        else:
            self.close_failed(text_of(error))

    def __repr__(self) -> str:
        state = "closed, " if self.closed else "aborted, " if self.aborted else ""
        return f"tessera.World({state}rank {self.rank} of {self.size}, {self.backend}, {self.device})"

    def __reduce__(self) -> NoReturn:
        raise usage_error("World: found a copy or a pickle of it, expected none; call tessera.init() in each process")


def is_good_end(error: BaseException) -> bool:
    """Whether the exception ends a process with exit code 0."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


def text_of(error: BaseException) -> str:
    """The exception in one line, with the line of the program that raised it, or that called a library which did."""
    cause = error.__context__
    if isinstance(error, SystemExit):
        # torch.multiprocessing.spawn and others turn an exception into an exit code.
        after = f", after {text_of(cause)}" if cause is not None else ""
        return f"sys.exit({error.code!r}){after}"
    lines = "".join(traceback.format_exception_only(type(error), error)).splitlines()
    text = " ".join(line.strip() for line in lines)
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return text
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    last = (own or frames)[-1]
    return f"{text} ({os.path.basename(last.filename)}:{last.lineno})"


_CODE: Any = vars(SystemExit)["code"]


class _Exit(SystemExit):
    """SystemExit as `sys.exit` raises it while there is a World. Where the interpreter itself reads its code, with no
    frame of Python around, the process ends with it; a caller that catches it before reads the same code."""

    @property
    def code(self) -> Any:
        code = _CODE.__get__(self)
        try:
            sys._getframe(1)
        except ValueError:
            _process.exit = self if code not in (None, 0) else None
        return code

    @code.setter
    def code(self, code: Any) -> None:
        _CODE.__set__(self, code)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy or a pickle is a plain SystemExit."""
        return SystemExit, self.args, vars(self)


_Exit.__name__ = _Exit.__qualname__ = "SystemExit"
_Exit.__module__ = "builtins"


def _exit(status: Any = None, /) -> NoReturn:
    """Exit the interpreter by raising SystemExit(status)."""
    if status is None:
        raise _Exit
    raise _Exit(*status) if isinstance(status, tuple) else _Exit(status)


def _fail_process() -> NoReturn:
    raise SystemExit(1)


class _Process:
    """The World of this process, and what tells the other ranks how the process ends."""

    def __init__(self) -> None:
        self.world: World | None = None
        self.asked: tuple[Any, ...] = ()  # what init() was called with
        self.exit: SystemExit | None = None  # that the interpreter ends with
        self.worlds = 0
        self.sharded: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.knows_forks = False
        self.undo: list[Callable[[], None]] = []

    def join(self, world: World, asked: tuple[Any, ...]) -> None:
        self.world = world
        self.asked = asked
        self.worlds += 1
        if not self.knows_forks:
            os.register_at_fork(after_in_child=self.forked)
            self.knows_forks = True
        if self.ends_by_finalizers():
            from multiprocessing.util import Finalize

            # Before those of queues and pools, which may wait for their threads.
            finalizer = Finalize(None, self.end, exitpriority=1000)
            self.undo.append(lambda: finalizer.cancel() if finalizer.still_active() else None)
        atexit.register(self.end)
        self.undo.append(lambda: atexit.unregister(self.end))
        if world.device.type != "cpu" and torch._C._is_multithreading_enabled():
            # Streams and waits of a device belong to the thread that runs the forward: backwards stay on it.
            torch.autograd.set_multithreading_enabled(False)
            self.undo.append(lambda: torch._C._set_multithreading_enabled(True))
        if world.size > 1:
            self.watch_exceptions()

    @staticmethod
    def ends_by_finalizers() -> bool:
        """Whether this is a process of multiprocessing: it ends by os._exit, and catches every exception."""
        process = sys.modules.get("multiprocessing.process")
        return process is not None and process.parent_process() is not None

    def watch_exceptions(self) -> None:
        """Puts hooks before those that are there. Where somebody has put others before ours since, they stay."""
        hook, thread_hook, leave = sys.excepthook, threading.excepthook, sys.exit

        def main(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            try:
                self.fail(error)
            finally:
                hook(kind, error, trace)

        def thread(args: threading.ExceptHookArgs) -> None:
            try:
                if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
                    self.fail(args.exc_value)
            finally:
                thread_hook(args)

        sys.excepthook, threading.excepthook, sys.exit = main, thread, _exit

        def undo() -> None:
            if sys.excepthook is main:
                sys.excepthook = hook
            if threading.excepthook is thread:
                threading.excepthook = thread_hook
            if sys.exit is _exit:
                sys.exit = leave

        self.undo.append(undo)

    def fail(self, error: BaseException) -> None:
        """An exception that is not caught: the other ranks hear of it first, while this one still prints it."""
        if self.world is not None:
            self.world.close_failed(text_of(error))

    def left(self, world: World) -> None:
        """After its end nothing of this package stands in the way of the host program."""
        if world is self.world and world.closed:
            self.unhook()

    def unhook(self) -> None:
        while self.undo:
            self.undo.pop()()

    def end(self) -> None:
        """The interpreter is still whole: what needs it goes before it does."""
        world = self.world
        if world is None or world.closed:
            return
        error = sys.exc_info()[1] or self.exit  # of a process of multiprocessing, that it still has to print
        if error is not None and not is_good_end(error):
            # Before units go, which would wait for reductions under way.
            world.close_failed(text_of(error))
            return
        for module in list(self.sharded):
            module.__dict__.pop(UNIT, None)
        was_aborted = world.aborted
        why = "an error on another rank, which says it, has ended the run"
        try:
            world.close()
        except Error as failure:
            why = str(failure)
        except BaseException as failure:  # Ctrl-C, or what another handler of a signal raises
            if self.ends_by_finalizers():
                raise  # multiprocessing makes an exit code of it
            why = text_of(failure)
        else:
            if world.aborted == was_aborted:
                return
        # This script is done. Another one is not, and never will be: the run has failed.
        print(f"tessera: rank {world.rank} was done, then: {why}", file=sys.stderr, flush=True)
        if not self.ends_by_finalizers():
            _C.exit_with_failure()
            return
        from multiprocessing.util import Finalize

        # multiprocessing prints what a finalizer raises, but for SystemExit, which makes its exit code: after those of
        # queues, which send what they hold.
        Finalize(None, _fail_process, exitpriority=-1000)

    def forked(self) -> None:
        """In a child: the World is its parent's, and the child may make one of its own."""
        self.world = None
        self.worlds = 0
        self.sharded = weakref.WeakSet()
        self.unhook()


_process = _Process()


def init(
    *,
    backend: str = "auto",
    device: str | torch.device | None = None,
    timeout: float | datetime.timedelta | None = None,
    init_timeout: float | datetime.timedelta | None = None,
    group: dist.ProcessGroup | None = None,
    prefer: Literal["process_group", "launcher"] = "process_group",
) -> World:
    """Joins the ranks of this run, once a process, and returns its World; a second call returns the same one.

    Where `torch.distributed` is initialised, its ranks join over its store, in any launcher. Otherwise the
    variables of torchrun (of Open MPI, PMI, Slurm) say who is there, and in a plain process the World is of one rank.
    It has connections of its own in addition to those of torch.distributed.

    Args:
        backend: "gloo" (CPU), "nccl" (CUDA), or "auto", which carries tensors of `device`.
        device: "cpu"; "cuda", from which each local rank takes the device of its number; or "cuda:0". None takes
            "cuda" where it is there, else "cpu".
        timeout: in seconds, of every collective; None is 100.
        init_timeout: in seconds, of joining the other ranks and of connecting with them later; None is 300.
        group: the default process group, or one with the same ranks in the same order; to say so, no other is taken.
        prefer: "launcher" reads the variables of the launcher although torch.distributed is initialised.

    Collective. Counterpart: torch.distributed.init_process_group. Errors: "usage" for contradictory variables, for a
    device that is not there, and for a second call with other arguments; "config" for a backend that does not carry
    its tensors; "comm" where the others do not come in time.
    """
    seconds = (_seconds("timeout", timeout), _seconds("init_timeout", init_timeout))
    asked = (backend, None if device is None else str(device), *seconds, group, prefer)
    current = _process.world
    if current is not None and not current.closed:
        if asked not in (_process.asked, ("auto", None, None, None, None, "process_group")):
            raise usage_error(
                f"init: found a second call with {_named(asked)} where the World was made with "
                f"{_named(_process.asked)}, expected the same or none; call world.close() before another init()"
            )
        return current
    if backend not in ("auto", "gloo", "nccl"):
        raise usage_error(f'init: found backend={backend!r}, expected "auto", "gloo" or "nccl"')
    if prefer not in ("process_group", "launcher"):
        raise usage_error(f'init: found prefer={prefer!r}, expected "process_group" or "launcher"')
    options: dict[str, Any] = {"backend": backend, "device": asked[1] or "auto"}
    options["timeout"], options["init_timeout"] = seconds
    bound = _over_process_group(group, prefer, options)
    if bound is None:
        if _process.worlds > 0 and _started_by_launcher():
            raise usage_error(
                "init: found a World that this process has closed, expected one a process under a launcher; close it "
                "at the end, or initialise torch.distributed first, over which another one can be made"
            )
        bound = _C.World.connect(**options)
    world = World(bound)
    _process.join(world, asked)
    return world


def world() -> World:
    """Returns the World that `init()` has made. Errors: "usage" where there is none, or it has closed."""
    current = _process.world
    if current is None or current.closed:
        state = "no World" if current is None else "a World that has closed"
        raise usage_error(f"world: found {state}, expected an open one; call tessera.init() first")
    return current


def track(module: torch.nn.Module) -> None:
    """Notes a sharded module: its unit is given up before the World closes at the end of the process."""
    _process.sharded.add(module)


def _seconds(name: str, timeout: float | datetime.timedelta | None) -> float | None:
    seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
    if seconds is not None and not 0 < seconds < 1e9:
        raise usage_error(f"init: found {name}={timeout}, expected a positive number of seconds")
    return seconds


def _named(asked: Sequence[Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in zip(_ARGUMENTS, asked, strict=True))


def _started_by_launcher() -> bool:
    return any(int(os.environ.get(name) or 1) > 1 for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))


def _over_process_group(group: dist.ProcessGroup | None, prefer: str, options: dict[str, Any]) -> _C.World | None:
    """None where there is no process group to join over."""
    initialised = dist.is_available() and dist.is_initialized()
    if group is not None:
        if prefer == "launcher" or not initialised:
            raise usage_error(
                f"init: found a group with prefer={prefer!r} and torch.distributed "
                f"{'' if initialised else 'not '}initialised, expected one or the other; leave out group"
            )
        ranks = dist.get_process_group_ranks(group)
        if ranks != list(range(dist.get_world_size())):
            raise usage_error(
                f"init: found group with ranks {ranks}, expected all {dist.get_world_size()} in order; "
                "leave out group, and arrange ranks by a mesh"
            )
    if prefer == "launcher" or not initialised:
        return None
    store = dist.distributed_c10d._get_default_store()
    return _C.World.from_store(store, dist.get_rank(), dist.get_world_size(), **options)


class Mesh:
    """How the ranks of the World are arranged: `dp_replicate` copies of the model, each cut over `dp_shard` ranks.

    Rank r has coordinate r // dp_shard of dp_replicate, and r % dp_shard of dp_shard. `fully_shard` takes one, or a
    torch DeviceMesh. Counterpart: torch.distributed.device_mesh.init_device_mesh.

    Args:
        dp_replicate: number of copies; 1 is plain sharding, above 1 is HSDP.
        dp_shard: ranks of one copy; None takes all that are left.

    Errors: "config" where dp_replicate x dp_shard is not the size of the World.
    """

    def __init__(self, *, dp_replicate: int = 1, dp_shard: int | None = None) -> None:
        current = world()
        if dp_shard is None:
            if dp_replicate < 1 or current.size % dp_replicate != 0:
                raise usage_error(
                    f"Mesh: found dp_replicate={dp_replicate}, expected a divisor of the World's {current.size} ranks"
                )
            dp_shard = current.size // dp_replicate
        self._mesh = _C.Mesh(current._world, dp_replicate, dp_shard)

    @property
    def dp_replicate(self) -> int:
        """Number of copies of the model."""
        return self._mesh.dp_replicate

    @property
    def dp_shard(self) -> int:
        """Number of ranks that have one copy of the model between them."""
        return self._mesh.dp_shard

    def __repr__(self) -> str:
        return f"tessera.Mesh(dp_replicate={self.dp_replicate}, dp_shard={self.dp_shard})"


def bound_mesh(mesh: Mesh | DeviceMesh | None) -> _C.Mesh:
    """The mesh that `fully_shard` was given, over the current World; None is all ranks.

    A DeviceMesh of one dim is dp_shard, one of two dims is dp_replicate x dp_shard, as FSDP2 reads them. Errors:
    "usage" for other dims, for names of axes that cannot be declared from Python, and for a mesh that does not have
    all ranks in order.
    """
    if mesh is None:
        return Mesh()._mesh
    if isinstance(mesh, Mesh):
        return mesh._mesh
    if not hasattr(mesh, "mesh_dim_names"):
        raise usage_error(f"mesh: found {type(mesh).__name__}, expected None, tessera.Mesh or a torch DeviceMesh")
    names = tuple(mesh.mesh_dim_names or ())
    shown = f"DeviceMesh of {' x '.join(map(str, mesh.mesh.shape))}" + (f" {names}" if names else "")
    refused = [name for name in names if name in _MODEL_AXES]
    if refused:
        raise usage_error(
            f"mesh: found {shown}, expected no dim {refused[0]!r}; shard over data ranks from Python, and see "
            "docs/fsdp2.md for models cut over other axes"
        )
    if mesh.ndim > 2:
        raise usage_error(f"mesh: found {shown}, expected one dim (dp_shard) or two (dp_replicate, dp_shard)")
    if mesh.ndim == 2 and names and (names[0] == "dp_shard" or names[1] == "dp_replicate"):
        raise usage_error(f"mesh: found {shown}, expected dp_replicate before dp_shard; swap the dims")
    ranks = mesh.mesh.flatten().tolist()
    size = world().size
    if ranks != list(range(size)):
        raise usage_error(
            f"mesh: found {shown} with ranks {ranks}, expected all {size} ranks of the World in order; "
            "make it of all ranks, or leave it out"
        )
    sizes = (1, *mesh.mesh.shape)[-2:]
    return Mesh(dp_replicate=sizes[0], dp_shard=sizes[1])._mesh
