"""The streaming backend with CPU tensors, its reference decoder and slots so small that layers take several steps."""

from __future__ import annotations

import torch

from megasync.receiver.bind import Binding
from megasync.receiver.stream import StreamBackend
from megasync.receiver.stream_decode import CpuDecoder


def stream_on_cpu(binding: Binding) -> StreamBackend:
    """Nothing is read before the write."""
    return StreamBackend(binding, CpuDecoder(), torch.device("cpu"), slot_limit_nbytes=1)


def reading_stream_on_cpu(binding: Binding) -> StreamBackend:
    """Everything is decoded and read before the write."""
    return StreamBackend(binding, CpuDecoder(), torch.device("cpu"), prove_by_reading=True)
