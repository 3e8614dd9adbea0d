"""Staging on a model-like engine rank: how long a whole call takes (P5), and what a decoding engine notices of it (P12).

A call of ``Applier.stage`` is measured from its look at the head to the last comparison of sums: manifest, frames, planes, tables,
live words, votes. The version staged is forgotten between calls, its manifest too. Before it: bench_receiver, which makes the rank
and publishes.
"""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from unittest.mock import patch

import numpy as np
import torch

from launch.bench.gpu_rank import Report
from megasync.config import Staging
from megasync.receiver import joining
from megasync.receiver.applier import Applier
from megasync.receiver.results import StageResult
from megasync.receiver.scatter import ScatterBackend
from megasync.receiver.session import Session
from megasync.receiver.stream_auto import QUIET_PROCESSES

if TYPE_CHECKING:
    from launch.bench.bench_receiver import Bench

DENSITY = 0.00085
SHARE_OF_FAST = 4
"""Tokens beside the fast mode: one in so many of those beside the quiet one, since it is not meant for an engine that serves."""


@dataclass
class Mode:
    """One way to stage.

    Attributes:
        staging: Quiet or fast.
        processes: Worker processes.
        backend: Its backend.
        applier: The receiver, one version behind; all modes share it, since joining audits all weights.
        session: Its session with this mode's backend.
        calls: Seconds of each call of ``stage``.
    """

    staging: Staging
    processes: int
    backend: ScatterBackend
    applier: Applier
    session: Session
    calls: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, applier: Applier, staging: Staging, processes: int) -> Mode:
        """Make its backend, and stage a few times, which makes its arenas and the memory of its processes."""
        held = applier._session
        assert held is not None
        backend = ScatterBackend(held.binding, processes=processes, quiet=staging is Staging.QUIET)
        config = replace(applier.config, staging=staging, workers=processes)
        session = replace(held, backend=backend, config=config, pool=ThreadPoolExecutor(processes), staged={})
        mode = cls(staging, processes, backend, applier, session)
        for _ in range(4):
            mode.stage()
        mode.calls.clear()
        return mode

    @property
    def name(self) -> str:
        """For rows."""
        return self.staging.value

    def stage(self) -> StageResult:
        """Stage the version again, as if it had just been published."""
        self.applier._session, self.applier._quiet = self.session, self.staging is Staging.QUIET
        self.session.staged.clear()
        self.applier._reader._manifests.clear()
        started = time.perf_counter()
        staged = self.applier.stage()
        self.calls.append(time.perf_counter() - started)
        assert staged is not None
        return staged

    def close(self) -> None:
        """End its processes and threads."""
        self.session.staged.clear()
        assert self.session.pool is not None
        self.session.pool.shutdown()
        if self.backend.workers is not None:
            self.backend.workers.close()


def one_behind(bench: Bench) -> Applier:
    """A receiver that has a version to stage."""
    backend = ScatterBackend(bench.binding)
    newest = bench.world.newest
    assert newest is not None
    # What is live was audited a moment ago, and its touched words are compared at every call.
    live = bench.tables[max(newest.version - 1, 0) % 2]
    with patch.object(joining, "audit", lambda binding, pool: live[binding.group_ids]):
        applier = bench.applier(backend)
    if newest.what == "checkpoint":
        bench.publish(backend)
    return applier


def freeze() -> None:
    """What engines do once they are loaded: a search for garbage among a million objects of a binding, ever the same ones, takes
    0.4 s in which no token comes."""
    gc.collect()
    gc.freeze()


def run_staging(bench: Bench, report: Report, num: int = 10) -> None:
    """P5: whole calls of ``Applier.stage`` with all cores, while nothing decodes."""
    mode = Mode.of(one_behind(bench), Staging.FAST, bench.workers)
    freeze()
    parts = []
    for _ in range(num):
        staged = mode.stage()
        parts.append(staged.stage_s)
        print(f"P5 call {mode.calls[-1] * 1e3:.1f} ms, fetch to live words {staged.stage_s * 1e3:.1f} ms", flush=True)
    newest = bench.world.newest
    assert newest is not None
    common = {
        "nbytes_in": staged.fetched_nbytes,
        "nbytes_out": staged.nbytes,
        "density": DENSITY,
        "live_nbytes": bench.world.live_nbytes,
        "workers": bench.workers,
        "num_frames": len(newest.frames),
        "staged_share": staged.num_changed / newest.num_changed,
    }
    report.add("P5 staging, as called", mode.calls, **common)
    report.add("P5 staging with the touched-old check", parts, **common)
    print(f"staged {common['staged_share']:.3f} of the entries, {mode.backend.memory()}", flush=True)
    mode.close()


def run_serving(bench: Bench, report: Report, tokens: int = 1000, rounds: int = 3) -> None:
    """P12: tokens of a decoder with a captured graph, alone and while versions are staged without a break, by turns."""
    decoder = Decoder(bench)
    decoder.decode(20)
    applier = one_behind(bench)
    quiet, fast = (Mode.of(applier, *m) for m in ((Staging.QUIET, QUIET_PROCESSES), (Staging.FAST, bench.workers)))
    freeze()
    found: dict[str, list[float]] = {"alone": [], quiet.name: [], fast.name: []}
    added = {}
    for _ in range(rounds):
        found["alone"] += decoder.decode(tokens)
        for mode, num in ((quiet, tokens), (fast, tokens // SHARE_OF_FAST)):
            seconds, added[mode.name] = _beside(decoder, mode, num)
            found[mode.name] += seconds
        print({name: np.percentile(x, (50, 99)).round(6).tolist() for name, x in found.items()}, flush=True)
    _token(report, "P12 token alone", found["alone"])
    for mode in (quiet, fast):
        _token(
            report,
            f"P12 token beside staging, {mode.name}",
            found[mode.name],
            stage_s=float(np.median(mode.calls)),
            num_staged=len(mode.calls),
            processes=mode.processes,
            hbm_nbytes=added[mode.name],
        )
        mode.close()


class Decoder:
    """A step that reads a fifth of the weights, bandwidth-bound as decoding is, in a CUDA graph.

    Args:
        bench: The rank whose weights it reads.
    """

    def __init__(self, bench: Bench) -> None:
        big = sorted(bench.world.engine.live.values(), key=lambda t: -t.numel())[:24]
        views = [t[: t.numel() // 12288 * 12288].view(torch.bfloat16).view(-1, 6144) for t in big]
        x = torch.randn(6144, 1, dtype=torch.bfloat16, device="cuda")
        for v in views:
            v @ x
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for v in views:
                v @ x

    def decode(self, num: int) -> list[float]:
        """Seconds of each of so many tokens."""
        out = []
        for _ in range(num):
            started = time.perf_counter()
            self.graph.replay()
            torch.cuda.current_stream().synchronize()
            out.append(time.perf_counter() - started)
        return out


def _beside(decoder: Decoder, mode: Mode, num: int) -> tuple[list[float], int]:
    """Tokens while a mode stages again and again, and the HBM that it took meanwhile."""
    mode.session.staged.clear()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    stop = threading.Event()

    def stage_on() -> None:
        while not stop.is_set():
            mode.stage()

    thread = threading.Thread(target=stage_on)
    thread.start()
    time.sleep(0.1)
    seconds = decoder.decode(num)
    held = before - torch.cuda.mem_get_info()[0]
    stop.set()
    thread.join()
    return seconds, held + mode.backend.memory().planes_nbytes


def _token(report: Report, case: str, found: list[float], **more: object) -> None:
    p50, p99, p999 = np.percentile(found, (50, 99, 99.9)).tolist()
    report.add(case, found, nbytes_in=0, nbytes_out=0, p99_s=p99, p999_s=p999, **more)
    print(
        f"{case}: {len(found)} tokens, p50 {p50 * 1e3:.3f} ms, p99 {p99 * 1e3:.3f} ms, p99.9 {p999 * 1e3:.3f} ms, most "
        f"{max(found) * 1e3:.3f} ms, {more}",
        flush=True,
    )
