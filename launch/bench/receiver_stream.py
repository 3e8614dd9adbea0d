"""The streaming apply on a model-like engine rank (P7): both slots at work, the decoder alone, the XOR alone; and a trace.

A sparse publication is transcoded to LZ4 blocks while staging and decoded by nvCOMP on the SMs. The decoder alone fills both
slots in turn as the whole does, a step ahead, and nothing reads them. Before it: bench_receiver, which makes the rank and
publishes.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from launch.bench import receiver_world
from launch.bench.gpu_rank import Report
from megasync.receiver.stage import stage
from megasync.receiver.stream import StreamBackend, sm_backend
from megasync.receiver.stream_placed import StreamPlaced
from megasync.versions.publication import PublicationReader

if TYPE_CHECKING:
    from launch.bench.bench_receiver import Bench

DENSITY = 0.00085
RUNS = 6
"""Of each case, the first one not counted: an even number, so that what was XORed in is out again."""

_KEPT = ("kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cuda_driver")
_ARGUMENTS = (
    "name",
    "labels",
    "sort_index",
    "stream",
    "bytes",
    "grid",
    "block",
    "registers per thread",
    "warps per SM",
)


def run_stream(bench: Bench, report: Report, trace: Path | None = None) -> None:
    """P7.

    Args:
        bench: The rank, with a publication.
        report: Gets the rows.
        trace: Where a chrome trace of one pass goes (``.json.gz``), None for none.
    """
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    backend, placed, staging_s = _staged(bench)
    before = bench.audit()
    placed.write_()
    placed.write_()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held = free - torch.cuda.mem_get_info()[0]
    seconds = {
        "P7 two slots, total": samples(placed.write_),
        "P7 two slots, the first steps decoded before the pause": samples(placed.write_, before=placed.arm),
        "P7 decoder alone": samples(lambda: decode_all(backend, placed)),
        "P7 XOR alone": samples(lambda: xor_all(backend, placed)),
    }
    if trace is not None:
        print(f"trace of {write_trace(placed.write_, trace)} bytes", flush=True)
        placed.write_()
    assert np.array_equal(bench.audit(), before), "an even number of passes does not restore"
    live = bench.world.live_nbytes
    more: dict[str, Any] = {"live_nbytes": live, "hbm_nbytes": held, "slots_nbytes": 2 * backend.slot_nbytes}
    more |= {"num_steps": len(placed.steps), "staging_s": staging_s}
    for name, found in seconds.items():
        report.add(name, found, nbytes_in=placed.nbytes, nbytes_out=live, density=DENSITY, **more)
    slots = 2 * backend.slot_nbytes
    print(f"HBM beyond the weights {held / 1e6:.0f} MB, slots {slots / 1e6:.0f} MB, {backend.memory()}", flush=True)


def _staged(bench: Bench) -> tuple[StreamBackend, StreamPlaced, float]:
    """The newest version placed for the stream, and the seconds that took."""
    backend = sm_backend(bench.binding)
    manifest = bench.world.newest
    assert manifest is not None
    reader = PublicationReader(bench.world.sink, receiver_world.RUN)
    started = time.perf_counter()
    with ThreadPoolExecutor(bench.workers) as pool:
        staged = stage(
            bench.binding, backend, reader, manifest, pool, limit_nbytes=1 << 40, read_live=False, in_flight=32
        )
    took = time.perf_counter() - started
    (placed,) = staged.placed
    assert isinstance(placed, StreamPlaced)
    return backend, placed, took


def decode_all(backend: StreamBackend, placed: StreamPlaced) -> None:
    """Decode all steps, one ahead, into both slots in turn."""
    steps, slots = placed.steps, backend.slots
    for n, step in enumerate(steps):
        for ahead in range(n + (n > 0), min(n + 2, len(steps))):
            slots.fill(ahead % 2, steps[ahead], placed.room, backend.decoder)
        slots.finish(n % 2, step, backend.decoder)


def xor_all(backend: StreamBackend, placed: StreamPlaced) -> None:
    """XOR what the slots hold, the masks of the last steps, into all steps."""
    with backend.queue.running():
        lanes, tables = placed._new_lanes(), placed._tables(0)
        for n in range(len(placed.steps)):
            placed._launch(n % 2, n, tables, lanes, write=True)
            tables = placed._tables((n + 1) % len(placed.steps))
        placed._done.clear()
        backend.queue.wait()


def samples(work: Callable[[], object], *, before: Callable[[], object] | None = None) -> list[float]:
    """Wall seconds of work, until the device is done; ``before`` is not counted."""
    found = []
    for _ in range(RUNS):
        if before is not None:
            before()
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return found[1:]


def write_trace(work: Callable[[], object], path: Path) -> int:
    """Keep a chrome trace of work's kernels, copies and calls of CUDA, gzip'ed; returns its bytes."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "trace.json"
        found.export_chrome_trace(str(raw))
        whole = json.loads(raw.read_text())
    data = gzip.compress(json.dumps(thin(whole), separators=(",", ":")).encode(), 9, mtime=0)
    path.write_bytes(data)
    return len(data)


def thin(whole: dict[str, Any]) -> dict[str, Any]:
    """A trace as torch exports it, without long arguments, and without what names the machine."""
    spans = [e for e in whole["traceEvents"] if e.get("ph") == "X" and e.get("cat") in _KEPT]
    used = {e["pid"] for e in spans}
    names = [e for e in whole["traceEvents"] if e.get("ph") == "M" and e["pid"] in used]
    events = []
    for e in names + spans:
        args = {k: v for k, v in e.get("args", {}).items() if k in _ARGUMENTS}
        events.append(e | {"name": e["name"][:120], "args": args})
    head = {k: whole[k] for k in ("schemaVersion", "deviceProperties", "displayTimeUnit") if k in whole}
    return head | {"traceEvents": events}
