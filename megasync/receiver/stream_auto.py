"""``auto`` on a GPU: which backend takes a publication, by one rule from its codecs and from what is there.

A publication whose frames are all Snappy or LZ4 blocks (with or without Zstd around) is streamed: by the Decompression Engine
where the device answers the probe, else on the SMs where nvCOMP is installed. Everything else goes through the scatter, dense
frames compacted on the host; so do blocks where neither decoder is there. Ranks of one engine that differ in what is
installed are refused before any write. Must import nothing above the backends.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from megasync.codecs.dense import BlockCodec
from megasync.codecs.registry import codecs
from megasync.manifest import Manifest
from megasync.receiver.backend import Backend, FetchedFrame, Placed, Placing
from megasync.receiver.bind import Binding
from megasync.receiver.scatter import ScatterBackend
from megasync.receiver.stream import StreamBackend
from megasync.receiver.stream_decode import make_decoder, why_not
from megasync.receiver.stream_placed import StreamPlaced
from megasync.receiver.sums import Sums

_MAX_PROCESSES = 8
QUIET_PROCESSES = 1
"""Worker processes beside an engine that decodes: more of them stage sooner and cost its tokens more (P12,
``launch.bench.bench_receiver``)."""

_log = logging.getLogger(__name__)


class AutoBackend(Backend):
    """See the module docstring.

    Attributes:
        name: Of the backend that wrote last; ``scatter`` before.

    Args:
        binding: The rank; its weights are on one GPU.
        quiet: Stage beside an engine that decodes.
    """

    threads = True
    entry_nbytes = ScatterBackend.entry_nbytes
    range_scale = ScatterBackend.range_scale

    def __init__(self, binding: Binding, *, quiet: bool = False) -> None:
        self.binding = binding
        self.scatter = ScatterBackend(binding, processes=default_processes(binding, quiet=quiet), quiet=quiet)
        self.name = self.scatter.name
        self._stream: StreamBackend | None = None
        self._asked = False

    def begin(self, manifest: Manifest, frames: np.ndarray) -> Placing:
        """See ``Backend.begin``."""
        return self._chosen(manifest).begin(manifest, frames)

    def place(self, frames: Sequence[FetchedFrame]) -> list[Placed]:
        """See ``Backend.place``."""
        return self._chosen(frames[0].manifest).place(frames) if frames else []

    def write_(self, placed: Sequence[Placed], pool: ThreadPoolExecutor | None) -> list[Sums]:
        """See ``Backend.write_``."""
        backend = self._maker(placed)
        self.name = backend.name
        return backend.write_(placed, pool)

    def undo_(self, placed: Sequence[Placed]) -> list[Sums]:
        """See ``Backend.undo_``."""
        return self._maker(placed).undo_(placed)

    def judge(self, error: BaseException) -> None:
        """See ``Backend.judge``."""
        self.scatter.judge(error)

    def _maker(self, placed: Sequence[Placed]) -> Backend:
        streamed = any(isinstance(p, StreamPlaced) for p in placed)
        return self._stream if streamed and self._stream is not None else self.scatter

    def _chosen(self, manifest: Manifest) -> Backend:
        blocks = [c.id for c in codecs().values() if isinstance(c, BlockCodec)]
        used = manifest.frames.columns["codec"]
        if not len(used) or not np.isin(used, blocks).all():
            return self.scatter
        if not self._asked:
            self._asked = True
            device = self.scatter.device
            reasons = {name: why_not(name, device) for name in ("de", "sm")}
            name = next((n for n, reason in reasons.items() if reason is None), None)
            if name is None:
                _log.info("block codecs are compacted on the host: %s", reasons)
            else:
                self._stream = StreamBackend(self.binding, make_decoder(name, device), device)
        return self._stream or self.scatter


def default_processes(binding: Binding, *, quiet: bool = False) -> int:
    """Worker processes of staging that ``auto`` takes: this GPU's share of the host's cores, 8 at most (1 where an engine is
    not to notice); none without a GPU."""
    if not any(d.type == "cuda" for d in binding.devices):
        return 0
    most = QUIET_PROCESSES if quiet else _MAX_PROCESSES
    return max(1, min(most, (os.cpu_count() or 1) // max(torch.cuda.device_count(), 1)))
