"""The plan of an apply over the table rows that the threads and processes of staging have written into an arena.

Comes between ``scatter_stage`` and ``scatter_placed``. Must not import them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megasync.kernels.records import PackedRecords
from megasync.kernels.scatter_plan import ScatterLaunch, ScatterPlan, Tiles
from megasync.receiver.scatter_rows import Piece
from megasync.receiver.scatter_store import GROUPS, SEGMENTS, TILES


def join_pieces(pieces: Sequence[Piece], pack: int, records: PackedRecords) -> ScatterPlan | None:
    """The plan of an arena through one pack.

    Args:
        pieces: The one piece of the arena.
        pack: Number of the pack in the order of ``packs_of``.
        records: That pack.

    Returns:
        The plan, its tables on the pack's device, copied on the current stream; None where no tile meets the pack.

    *Memory*: the arrays on the host are the arena's, which must stay as they are until the copies have ended.
    """
    (piece,) = pieces
    store, end = piece.store, piece.end
    before = sum(store.shape.packs[:pack])
    launches = []
    for g, group in enumerate(records.groups):
        num_tiles, num = end[GROUPS + 2 * (before + g) : GROUPS + 2 * (before + g) + 2]
        if num:
            rows = store.groups[pack][g]
            first_entry, first_dense = rows.first_entry[: num + 1], rows.first_dense[: num + 1]
            first_entry[num], first_dense[num] = piece.end_entry, piece.end_dense
            launches.append(
                ScatterLaunch(
                    group,
                    _upload(rows.segments[:num], records.device),
                    _upload(rows.tiles[:num_tiles], records.device),
                    first_entry,
                    first_dense,
                )
            )
    if not launches:
        return None
    tiles, segments = end[TILES], end[SEGMENTS]
    where = Tiles(store.rows[:tiles], store.starts[:tiles], store.extents[:tiles])
    return ScatterPlan(records, where, store.counts[:segments], tuple(launches), piece.end_entry, piece.end_dense)


def _upload(rows: np.ndarray, device: torch.device) -> torch.Tensor:
    """int32 rows on the device; the arena's own memory on the CPU."""
    return torch.from_numpy(rows).to(device, non_blocking=True)
