"""Digest sums of weights where they lie, in plain torch: for replica checks and for a snapshot on a device.

The formula is that of ``megasync.digest``; 64-bit sums wrap, so signed arithmetic gives the same bits. Runs of 16 bytes
take a fast form, four units a multiplier. Must not import receiver or an adapter.
"""

from __future__ import annotations

from math import prod

import numpy as np
import torch

from megasync.digest import MASK64
from megasync.kernels.weights import LANE_C, LANE_S, signed, splitmix64_reference, word_terms_reference
from megasync.trainer.snapshot import SAME_SIZE
from megasync.types import Box, Lanes

_SLAB_NBYTES = 32 << 20
_GROUP_NBYTES = 16


def device_lanes(shape: tuple[int, ...], box: Box, data: torch.Tensor) -> Lanes:
    """Digest sum of a box of a canonical tensor, computed where its words are.

    Args:
        shape: Extents of the whole tensor in words.
        box: The box.
        data: Its words, any dtype of the word size, shape ``box.extent``, any device, any strides.

    Returns:
        The sums of both lanes: what ``digest.box_lanes`` gives.

    *Stream*: the current stream; the sums are read back, so it is synchronised on return. *Memory*: 32 MiB of words at a
    time, and about ten times that in temporaries.
    """
    total = torch.zeros(2, dtype=torch.int64, device=data.device)
    for part, words in _slabs(box, data.detach().view(SAME_SIZE[data.element_size()])):
        total += _slab_lanes(shape, part, words.contiguous())
    a, b = total.tolist()
    return Lanes(a & MASK64, b & MASK64)


def _slabs(box: Box, data: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
    """The box cut along its first axis, or the next ones where rows are longer than a slab."""
    if data.nbytes <= _SLAB_NBYTES:
        return [(box, data)] if data.numel() else []
    axis = next(i for i, n in enumerate(box.extent) if n > 1)
    step = max(1, box.extent[axis] * _SLAB_NBYTES // data.nbytes)
    out = []
    for at in range(0, box.extent[axis], step):
        num = min(step, box.extent[axis] - at)
        start = tuple(s + at if i == axis else s for i, s in enumerate(box.start))
        extent = tuple(num if i == axis else n for i, n in enumerate(box.extent))
        out += _slabs(Box(start, extent), data.narrow(axis, at, num))
    return out


def _slab_lanes(shape: tuple[int, ...], box: Box, words: torch.Tensor) -> torch.Tensor:
    """Sums of a small box of contiguous words: int64 ``[2]``."""
    w = words.element_size()
    starts, run = _runs(shape, box)
    first = torch.from_numpy(starts).to(words.device)
    if run * w % _GROUP_NBYTES == 0 and not (starts * w % _GROUP_NBYTES).any():
        per_run = run * w // _GROUP_NBYTES
        group = (first * w // _GROUP_NBYTES)[:, None] + torch.arange(per_run, device=words.device)
        units = words.view(-1).view(torch.int32).view(-1, 4).to(torch.int64) & 0xFFFFFFFF
        sums = []
        for lane in (0, 1):
            weight = splitmix64_reference(group.reshape(-1) + signed(LANE_S[lane])) | 1
            by_unit = (units * weight[:, None]).sum(0)
            factors = torch.tensor([signed(c) for c in LANE_C[lane]], dtype=torch.int64, device=words.device)
            sums.append((by_unit * factors).sum())
        return torch.stack(sums)
    flat = (first[:, None] + torch.arange(run, device=words.device)).reshape(-1)
    values = words.reshape(-1).to(torch.int64)
    if w < 8:
        values &= (1 << (8 * w)) - 1
    return word_terms_reference(flat, values, w).sum(0)


def _runs(shape: tuple[int, ...], box: Box) -> tuple[np.ndarray, int]:
    """First canonical word (int64) of each run of words that lie together in the tensor, and the words of a run."""
    inner = len(shape)
    while inner and box.extent[inner - 1] == shape[inner - 1]:
        inner -= 1
    inner = max(inner - 1, 0)  # the first axis that the box cuts still lies together with what is inside it
    run = prod(box.extent[inner:])
    starts = np.zeros(1, dtype=np.int64)
    for axis in range(inner):
        starts = (
            starts[:, None] * shape[axis] + np.arange(box.start[axis], box.start[axis] + box.extent[axis])
        ).ravel()
    for axis in range(inner, len(shape)):
        starts = starts * shape[axis] + box.start[axis]
    return starts, run
