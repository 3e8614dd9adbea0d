"""Many planes packed at once: the bytes of ``planes.pack``, by threads that do not hold the interpreter.

A publication has some thousand planes of a few kilobytes each, and one call a plane costs as much as compressing it.
Comes after the device's mask stage, before gather. Must import nothing above codecs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import zstandard

from megasync.codecs.planes import pack, plane_compressor


def pack_all(raw: Sequence[np.ndarray], num_threads: int = 1) -> list[bytes]:
    """The stored form of every plane, as ``planes.pack`` gives it.

    Args:
        raw: Planes, any dtype, each contiguous.
        num_threads: Threads that compress.
    """
    if "multi_compress_to_buffer" not in zstandard.backend_features:
        return [pack(p) for p in raw]
    views = [p for p in raw if p.size]
    if not views:
        return [b""] * len(raw)
    threads = max(1, min(num_threads, len(views)))
    packed = iter(plane_compressor().multi_compress_to_buffer(views, threads=threads))  # type: ignore[arg-type]
    out: list[bytes] = []
    for p in raw:
        if not p.size:
            out.append(b"")
            continue
        stored = next(packed)
        out.append(stored.tobytes() if len(stored) < p.nbytes else p.tobytes())
    return out
