"""Writes what ran on the GPU, by stream, as a small gzip'ed Chrome trace: kernels and copies, without their host side.

Used by launch/gpu_megatron.py. Open it in ui.perfetto.dev or chrome://tracing. Imports nothing of megasync.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_KEPT = ("stream", "grid", "block", "bytes")
_NAME = 80


def write_trace(profiler: Any, path: Path) -> None:
    """Export a profile, slimmed.

    Args:
        profiler: A ``torch.profiler.profile`` that has ended.
        path: Ends in ``.json.gz``.
    """
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(whole))
        trace = json.loads(whole.read_text())
    events = [_slim(e) for e in trace["traceEvents"] if e.get("ph") == "M" or e.get("cat") in _ON_DEVICE]
    kept = {k: v for k, v in trace.items() if k in ("schemaVersion", "deviceProperties", "displayTimeUnit")}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(kept | {"traceEvents": events}).encode(), 9, mtime=0))


def _slim(event: dict[str, Any]) -> dict[str, Any]:
    if event.get("ph") == "M":
        return event
    out = {k: event[k] for k in ("ph", "cat", "pid", "tid", "ts", "dur")}
    args = event.get("args", {})
    return out | {"name": event["name"][:_NAME], "args": {k: args[k] for k in _KEPT if k in args}}
