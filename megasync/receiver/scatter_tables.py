"""The plan of an apply, put together from the table rows that the threads and processes of staging have made.

Comes between ``scatter_stage`` and ``scatter_placed``. Must not import them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megasync.kernels.records import PackedRecords
from megasync.kernels.scatter_plan import ScatterLaunch, ScatterPlan, Tiles
from megasync.receiver.scatter_rows import Piece


def join_pieces(pieces: Sequence[Piece], pack: int, records: PackedRecords) -> ScatterPlan | None:
    """The plan of all pieces of one arena through one pack.

    Args:
        pieces: In the order of their planes.
        pack: Number of the pack in the order of ``packs_of``.
        records: That pack.

    Returns:
        The plan, its tables on the pack's device, copied on the current stream; None where no tile meets the pack.
    """
    last = pieces[-1]
    launches = []
    for g, group in enumerate(records.groups):
        mine = [r for p in pieces if (r := p.groups[pack][g]) is not None]
        if any(len(r.segments) for r in mine):
            base = np.cumsum([0, *(len(r.tiles) for r in mine)]).tolist()
            segments = _joined([r.segments for r in mine], records.device)
            host = segments.numpy()
            stop = np.cumsum([0, *(len(r.segments) for r in mine)]).tolist()
            for i, b in enumerate(base[:-1]):
                host[stop[i] : stop[i + 1], 2] += b
            launches.append(
                ScatterLaunch(
                    group,
                    segments.to(records.device, non_blocking=True),
                    _joined([r.tiles for r in mine], records.device).to(records.device, non_blocking=True),
                    np.concatenate([*(r.first_entry for r in mine), [last.end_entry]]),
                    np.concatenate([*(r.first_dense for r in mine), [last.end_dense]]),
                )
            )
    if not launches:
        return None
    tiles = Tiles(
        np.concatenate([p.rows for p in pieces]),
        np.concatenate([p.starts for p in pieces]).astype(np.int64),
        np.concatenate([p.extents for p in pieces]).astype(np.int64),
    )
    counts = np.concatenate([p.counts for p in pieces])
    return ScatterPlan(records, tiles, counts, tuple(launches), last.end_entry, last.end_dense)


def _joined(parts: Sequence[np.ndarray], device: torch.device) -> torch.Tensor:
    """int32 arrays one after the other, in pinned memory where they go to a GPU."""
    shape = (sum(len(p) for p in parts), parts[0].shape[1])
    out = torch.empty(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
    np.concatenate(parts, out=out.numpy())
    return out
