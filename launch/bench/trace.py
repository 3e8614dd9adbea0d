"""A chrome trace of one sync beside decoding, small enough to keep: full around the pause, thinned out elsewhere.

A decoder launches about a thousand kernels a token, and staging lasts many tokens. What is kept: everything within some
milliseconds of the pause, everything that is not a kernel of the decoder, and of the decoder's kernels elsewhere the first and
the last of each token. Opens in chrome://tracing and in Perfetto. Before it: decoder. After it: bench_engine.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from launch.bench.decoder import DecodeLoop

AROUND_US = 12_000.0
"""Microseconds before and after the pause that are kept whole."""

GAP_US = 25.0
"""A pause between two kernels of one stream from which a new token is taken to begin."""

_MOST_NBYTES = 950_000
_GPU = ("kernel", "gpu_memcpy", "gpu_memset")

Event = dict[str, Any]


def save_trace(path: Path, sync: Callable[[], object], loop: DecodeLoop) -> int:
    """Profile a sync.

    Args:
        path: Where the trace goes, ``.json.gz``.
        sync: Stages and takes a version; the loop decodes meanwhile.
        loop: The decoder.

    Returns:
        Bytes written.
    """
    activities = [ProfilerActivity.CPU]
    if loop.decoder.tokens.is_cuda:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as found:
        loop.wait(3)
        sync()
        loop.wait(5)
        if loop.decoder.tokens.is_cuda:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "trace.json"
        found.export_chrome_trace(str(raw))
        whole = json.loads(raw.read_text())
    around = AROUND_US
    while True:
        data = gzip.compress(json.dumps(thin(whole, around), separators=(",", ":")).encode(), 9, mtime=0)
        if len(data) < _MOST_NBYTES or around < 500:
            break
        around /= 2
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    print(f"{path}: {len(data)} bytes of {len(whole['traceEvents'])} events", flush=True)
    return len(data)


def thin(trace: dict[str, Any], around_us: float) -> dict[str, Any]:
    """A trace without most of the decoder's kernels far from the pause, and without what names this machine.

    Args:
        trace: As torch exports it.
        around_us: Microseconds before and after the span ``megasync.apply`` that are kept whole.
    """
    events: list[Event] = trace["traceEvents"]
    applies = [e for e in events if e.get("name") == "megasync.apply" and "dur" in e]
    begin = min((float(e["ts"]) for e in applies), default=0.0) - around_us
    end = max((float(e["ts"]) + float(e["dur"]) for e in applies), default=0.0) + around_us
    kernels = [e for e in events if e.get("cat") == "kernel"]
    by_stream = Counter(e["tid"] for e in kernels)
    decoder = by_stream.most_common(1)[0][0] if by_stream else None
    mine = sorted((e for e in kernels if e["tid"] == decoder), key=lambda e: float(e["ts"]))
    dropped = set()
    for i, e in enumerate(mine[1:-1], 1):
        at, stop = float(e["ts"]), float(e["ts"]) + float(e["dur"])
        before = float(mine[i - 1]["ts"]) + float(mine[i - 1]["dur"])
        inside = at - before < GAP_US and float(mine[i + 1]["ts"]) - stop < GAP_US
        if inside and not begin < at < end:
            dropped.add(id(e))
    far = [e for e in events if id(e) not in dropped and _is_kept(e, begin, end)]
    named = {k: trace[k] for k in ("schemaVersion", "displayTimeUnit", "baseTimeNanoseconds") if k in trace}
    about = f"{len(events) - len(far)} of {len(events)} events left out: see launch/bench/trace.py"
    return named | {"traceEvents": [_plain(e) for e in far], "about": about}


def _is_kept(e: Event, begin: float, end: float) -> bool:
    """Near the pause everything is; elsewhere what the device did, megasync's spans, launches of graphs, and names."""
    if "ts" not in e or e.get("ph") == "M" or begin < float(e["ts"]) < end:
        return e.get("cat") != "ac2g" and e.get("ph") not in ("s", "f")
    name = str(e.get("name", ""))
    return e.get("cat") in _GPU or name.startswith("megasync.") or "GraphLaunch" in name


def _plain(e: Event) -> Event:
    """An event without its long arguments."""
    kept = {k: v for k, v in e.items() if k != "args"}
    args = e.get("args") or {}
    short = {k: args[k] for k in ("name", "labels", "sort_index", "stream", "bytes", "grid", "block") if k in args}
    if isinstance(kept.get("name"), str):
        kept["name"] = kept["name"][:120]
    return kept | ({"args": short} if short else {})
