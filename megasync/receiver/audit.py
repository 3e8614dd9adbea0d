"""The audit: the state digest of every live tensor, read through the layouts, streaming.

Answers which bytes are live, whoever wrote them: at join, on demand, and in tests. Copies are compared with what leads,
replicas with their primaries, derived tensors with a fresh derivation. Weights on a GPU are digested by kernels, through
``scatter_audit``; the rest with numpy. Must import nothing above tally.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod

import numpy as np

from megasync.digest import state_digest
from megasync.receiver.bind import Binding
from megasync.receiver.dense import check_copies, held_sums, read_words
from megasync.receiver.leads import Held
from megasync.receiver.scatter_audit import device_sums, split_ids
from megasync.receiver.sums import Sums
from megasync.receiver.tally import tally
from megasync.types import Box, Lanes

PIECE_NBYTES = 16 << 20
"""Canonical bytes that are held at a time, for each thread."""


def pieces(held: Held) -> Iterator[Held]:
    """A tensor's slice cut along its first axis that has an extent, so that a piece is small."""
    layout = held.layout
    extent = layout.slice_shape
    axis = next((a for a, n in enumerate(extent) if n > 1), 0)
    row_nbytes = max(prod(extent) // max(extent[axis], 1), 1) * layout.word_nbytes
    step = max(PIECE_NBYTES // row_nbytes, 1)
    for at in range(0, extent[axis], step):
        start = (*layout.start[:axis], layout.start[axis] + at, *layout.start[axis + 1 :])
        size = (*extent[:axis], min(step, extent[axis] - at), *extent[axis + 1 :])
        piece = held.clipped(Box(start, size)) if step < extent[axis] else held
        if piece is not None:
            yield piece


def live_sums(binding: Binding, tensor_id: int) -> Sums:
    """Digest sums of one tensor's live words on this rank.

    Raises:
        BaseMismatchError: Copies on this rank differ.
    """
    found = []
    name = binding.schema.tensors[tensor_id].name
    for piece in pieces(binding.held[tensor_id]):
        words = read_words(piece.reading, binding.storages)
        check_copies(name, piece, words, binding.storages)
        found.append(held_sums(binding, tensor_id, piece, words))
    return Sums.join(found)


def audit(
    binding: Binding, pool: ThreadPoolExecutor | None, *, ids: np.ndarray | None = None, derived: bool = True
) -> np.ndarray:
    """State digests of the live tensors. *Collective*.

    Args:
        binding: This rank.
        pool: Threads to read host memory on, None for the caller's.
        ids: int64, ascending: which tensors; all that the engine holds by default.
        derived: Compare derived tensors too.

    Returns:
        uint8 ``[len(ids), 16]``.

    Raises:
        BaseMismatchError: Live tensors are not where they were bound, copies differ, or a derived tensor is not the
            derivation of its canonical bytes.
        ReplicaDriftError: A replica differs from its primary.
    """
    chosen = binding.group_ids if ids is None else ids

    def body() -> list[list[Sums]]:
        binding.check_alive()  # bytes that the engine no longer reads prove nothing
        mine = [int(i) for i in chosen if int(i) in binding.held]
        on_gpu, on_host, device = split_ids(binding, mine)
        sums = device_sums(binding, on_gpu, device) if device is not None and on_gpu else []
        run = map if pool is None else pool.map
        sums += run(lambda i: live_sums(binding, i), on_host)
        if derived:
            binding.shadows.check(binding.engine.tensors(), binding.storages)
        return [sums]

    (total,) = tally(binding, f"audit of {binding.engine.name}", chosen, body)
    specs = [binding.schema.tensors[int(i)] for i in chosen]
    digests = [state_digest(spec, Lanes(int(a), int(b))) for spec, (a, b) in zip(specs, total.tolist(), strict=True)]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 16)
