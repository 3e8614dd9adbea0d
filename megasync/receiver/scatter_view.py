"""What staging for the scatter needs to know of a rank, as plain arrays: shared with worker processes, no torch in it.

Made by ``scatter_layout``; read by ``scatter_keep`` and ``scatter_rows``. Must import nothing above types.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class WordView:
    """The tensors of one word size.

    Attributes:
        num_axes: Axes of the kernels' tables.
        num_tensors: Rows of the packs.
        groups: For each pack and record group int32 ``[2, num_tensors]``: first record of each tensor and the end.
    """

    num_axes: int
    num_tensors: int
    groups: tuple[tuple[np.ndarray, ...], ...]


@dataclass(frozen=True, slots=True)
class StageView:
    """One engine rank as staging sees it. Tile arrays are over all tiles of all tensors, in id order.

    Attributes:
        first_tile: int64 ``[num_tensors + 1]``.
        tile_words: u32 ``[num_tiles]``.
        keep: bool ``[num_tiles]``, tiles of which this rank holds words on the device.
        partly: bool ``[num_tiles]``, tiles of which it holds only some words.
        starts: int32 ``[num_tiles, ndim]``, leading axes of shorter shapes are 0.
        extents: int32 ``[num_tiles, ndim]``, leading axes of shorter shapes are 1.
        row: int32 ``[num_tensors]``, row in the packs of its word size, -1 where it is not on the device.
        words: By word size.
        tile_head: Columns of a tile's row before its axes.
        whole: Tables number tiles by the planes (the kernels' reference does), so that none may be left out.
        held: Of tensors with tiles held in part: int64 ``[boxes, 2, ndim]``, starts and stops of what is held, in words.
    """

    first_tile: np.ndarray
    tile_words: np.ndarray
    keep: np.ndarray
    partly: np.ndarray
    starts: np.ndarray
    extents: np.ndarray
    row: np.ndarray
    words: dict[int, WordView]
    tile_head: int
    whole: bool
    held: dict[int, np.ndarray]
