"""Runs a function on real ranks: forked from a warm process, joined by a file, every traceback shown.

``run_ranks(fn, world_size, tmp_path, *args)`` calls ``fn(rank, world_size, *args)`` in ``world_size`` processes that share
a gloo group, and gives back what each returned. Processes come from the multiprocessing forkserver, which imported torch
(and what ``preload`` named) once, so a rank costs a fork and not an interpreter with torch. ``fn`` must be a module-level
callable; arguments and results must pickle (tensors travel by value).

Must not import megatron or megasync: every multi-rank test uses it.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import inspect
import itertools
import multiprocessing
import operator
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOADED: list[str] = ["torch", "torch.distributed", "pytest"]
_CONTEXT.set_forkserver_preload(_PRELOADED)
_RUNS = itertools.count()


class RanksError(AssertionError):
    """At least one rank failed, died or hung; the message has every rank's traceback."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one rank ended.

    Attributes:
        rank: The rank.
        value: What the function returned; None where it failed.
        error: Traceback text, or how the process died or hung; empty on success.
    """

    rank: int
    value: Any
    error: str


@dataclass(frozen=True, slots=True)
class _Job:
    """What a rank's process must do. The function goes as a name, so that any pytest import mode works."""

    module: str
    file: str
    qualname: str
    args: tuple[Any, ...]
    rendezvous: str
    stacks: str
    backend: str
    group_timeout_s: float


def preload(*modules: str) -> None:
    """Have the warm process import more modules, so that ranks find them loaded.

    Call it at the top of a test module: pytest imports every test module before it runs the first test. A module that is
    not found, or named after the first run, is simply imported by the ranks themselves.

    Args:
        *modules: Importable module names (from site-packages or PYTHONPATH).
    """
    _PRELOADED.extend(m for m in modules if m not in _PRELOADED)
    _CONTEXT.set_forkserver_preload(_PRELOADED)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    tmp_path: Path,
    *args: Any,
    timeout_s: float = 60.0,
    group_timeout_s: float = 30.0,
    backend: str = "gloo",
) -> list[Any]:
    """Run ``fn(rank, world_size, *args)`` on every rank of a fresh group.

    Args:
        fn: Module-level callable.
        world_size: Ranks.
        tmp_path: Folder for the rendezvous file; may be shared by several runs.
        *args: Passed on; must pickle.
        timeout_s: Seconds after which ranks that still run are shown and killed.
        group_timeout_s: Timeout of the group's collectives, in seconds.
        backend: torch.distributed backend; empty for no process group at all.

    Returns:
        What each rank returned, by rank.

    Raises:
        RanksError: A rank failed; the message has the tracebacks of all of them.
    """
    outcomes = collect_ranks(
        fn,
        world_size,
        tmp_path,
        *args,
        timeout_s=timeout_s,
        group_timeout_s=group_timeout_s,
        backend=backend,
    )
    failed = [o for o in outcomes if o.error]
    if failed:
        texts = "\n".join(f"--- rank {o.rank} of {world_size} ---\n{o.error.rstrip()}" for o in failed)
        raise RanksError(f"{len(failed)} of {world_size} ranks failed in {fn.__qualname__}\n{texts}")
    return [o.value for o in outcomes]


def collect_ranks(
    fn: Callable[..., Any],
    world_size: int,
    tmp_path: Path,
    *args: Any,
    timeout_s: float = 60.0,
    grace_s: float = 35.0,
    group_timeout_s: float = 30.0,
    backend: str = "gloo",
) -> list[Outcome]:
    """Like ``run_ranks``, for tests that want a rank to fail: gives back every rank's end instead of raising.

    Args:
        fn: Module-level callable.
        world_size: Ranks.
        tmp_path: Folder for the rendezvous file.
        *args: Passed on; must pickle.
        timeout_s: Seconds that the whole run may take.
        grace_s: Seconds that the others still get after the first rank failed.
        group_timeout_s: Timeout of the group's collectives, in seconds.
        backend: torch.distributed backend; empty for no process group at all.

    Returns:
        One outcome a rank, by rank.
    """
    run = next(_RUNS)
    job = _Job(
        module=fn.__module__,
        file=inspect.getfile(fn),
        qualname=fn.__qualname__,
        args=args,
        rendezvous=str(tmp_path / f"rendezvous-{os.getpid()}-{run}"),
        stacks=str(tmp_path / f"stacks-{os.getpid()}-{run}"),
        backend=backend,
        group_timeout_s=group_timeout_s,
    )
    blob = pickle.dumps(job)
    processes: list[ForkServerProcess] = []
    pipes: dict[Connection, int] = {}
    try:
        for rank in range(world_size):
            receive, send = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(target=_rank_main, args=(rank, world_size, blob, send), daemon=True)
            process.start()
            send.close()
            processes.append(process)
            pipes[receive] = rank
        return _await(job, pipes, processes, timeout_s, grace_s)
    finally:
        for process in processes:
            process.join(timeout=5.0)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in pipes:
            pipe.close()


def _await(
    job: _Job,
    pipes: dict[Connection, int],
    processes: list[ForkServerProcess],
    timeout_s: float,
    grace_s: float,
) -> list[Outcome]:
    """Wait for every rank's report, or for its pipe to close, or for the deadline."""
    deadline = time.monotonic() + timeout_s
    open_pipes = dict(pipes)
    outcomes: dict[int, Outcome] = {}
    while open_pipes:
        ready = wait(list(open_pipes), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = open_pipes.pop(pipe)
            try:
                value, error = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join(timeout=5.0)
                value, error = (
                    None,
                    f"died without a report, exit code {processes[rank].exitcode}",
                )
            outcomes[rank] = Outcome(rank, value, error)
            if error:
                deadline = min(deadline, time.monotonic() + grace_s)
    for rank in open_pipes.values():
        outcomes[rank] = Outcome(
            rank,
            None,
            "still running at the deadline\n" + _stacks_of(job, rank, processes[rank]),
        )
    return [outcomes[rank] for rank in sorted(outcomes)]


def _stacks_of(job: _Job, rank: int, process: ForkServerProcess) -> str:
    """The stacks of a rank that hangs (its faulthandler writes them on a signal), after which it is killed."""
    assert process.pid is not None
    path = Path(f"{job.stacks}-{rank}")
    if path.exists():
        os.kill(process.pid, signal.SIGUSR1)
        # The handler runs in the target at once; joining gives it the time and ends early if the rank ends after all.
        process.join(timeout=0.5)
    process.kill()
    return path.read_text(errors="replace") if path.exists() else "(no stacks: it hung before the function began)"


def _rank_main(rank: int, world_size: int, blob: bytes, pipe: Connection) -> None:
    """Body of a rank's process: load the function, join the group, run, report, leave."""
    try:
        job = pickle.loads(blob)
        assert isinstance(job, _Job)
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        os.environ.update(
            OMP_NUM_THREADS="1",
            RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_RANK=str(rank),
        )
        if sys.platform == "linux":
            # Without it gloo resolves the host name, which containers often cannot.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with Path(f"{job.stacks}-{rank}").open("w") as stacks:
            faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
            fn = _load_function(job)
            if job.backend:
                dist.init_process_group(
                    job.backend,
                    init_method=f"file://{job.rendezvous}",
                    rank=rank,
                    world_size=world_size,
                    timeout=timedelta(seconds=job.group_timeout_s),
                )
            value = fn(rank, world_size, *job.args)
            report = pickle.dumps((value, ""))
            if dist.is_initialized():
                dist.destroy_process_group()
    except BaseException:
        # Reported before anything else may hang: peers find their connection closed and fail too.
        pipe.send_bytes(pickle.dumps((None, traceback.format_exc())))
        pipe.close()
        sys.stderr.flush()
        os._exit(1)
    pipe.send_bytes(report)
    pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not a normal exit: libraries leave threads and atexit work behind that a test must not wait for.
    os._exit(0)


def _load_function(job: _Job) -> Callable[..., Any]:
    """The test's function: by module name, or from its file where pytest gave the module a name of its own."""
    try:
        module = importlib.import_module(job.module)
    except ImportError:
        spec = importlib.util.spec_from_file_location(job.module, job.file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[job.module] = module
        spec.loader.exec_module(module)
    found: Callable[..., Any] = operator.attrgetter(job.qualname)(module)
    return found
