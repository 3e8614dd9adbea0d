"""Tables of the compaction over views with permuted axes and odd sizes: every word once, where it lies, and in time."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.kernels.compact_plan import CompactPlan, plan_compact
from megasync.kernels.compact_runs import PIECE_VECTORS, Region
from megasync.kernels.scatter_plan import Tiles
from megasync.types import SEGMENT_WORDS


def view(data: st.DataObject, extent: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A view of that shape: axes in any order, any of them with steps, anywhere in its storage."""
    order = data.draw(st.permutations(range(len(extent))))
    steps = [data.draw(st.sampled_from([1, 1, 1, 2, 3])) for _ in extent]
    storage = torch.zeros([extent[a] * steps[a] for a in order], dtype=dtype)
    live = storage.permute([order.index(a) for a in range(len(extent))])
    return live[tuple(slice(None, None, s) for s in steps)]


def words_of_pieces(plan: CompactPlan) -> np.ndarray:
    """Of every word of every piece: tensor, segment, position in it, canonical number, live address, snapshot byte."""
    w, out = plan.word_nbytes, []
    for row, vector in zip(plan.rows.tolist(), plan.vector_nbytes.tolist(), strict=True):
        address, live_step, _, _, per_row, first, num, snapshot, position, position_step, flat, flat_step = row[:12]
        assert 0 < num <= PIECE_VECTORS
        at = np.arange(first * vector, (first + num) * vector, w)  # bytes of the run's rows, which follow each other
        rows, inside = np.divmod(at, per_row * vector)
        word = inside // w
        out.append(
            np.stack(
                (
                    np.full(len(at), row[12]),
                    np.full(len(at), row[13]),
                    position + rows * position_step + word,
                    flat + rows * flat_step + word,
                    address + rows * live_step + inside,
                    snapshot + at,
                ),
                axis=1,
            )
        )
    return np.concatenate(out)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_word_is_in_one_piece_with_its_own_place(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.uint8, torch.int16, torch.int32, torch.int64]))
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 7, 33, 70]), min_size=1, max_size=3)))
    w = dtype.itemsize
    # Two tiles one beside the other along one axis, each of them cut in two regions along another.
    axis, other = (data.draw(st.integers(0, len(shape) - 1)) for _ in range(2))
    half = data.draw(st.integers(0, shape[axis]))
    boxes = []
    for low, high in ((0, half), (half, shape[axis])):
        start, extent = list(np.zeros(len(shape), int)), list(shape)
        start[axis], extent[axis] = low, high - low
        if extent[axis]:
            boxes.append((start, extent))
    tiles = Tiles(np.zeros(len(boxes), np.int64), np.array([b[0] for b in boxes]), np.array([b[1] for b in boxes]))
    regions, at, wanted = [], 0, []
    segment = 0
    for tile, (start, extent) in enumerate(boxes):
        cut = data.draw(st.integers(0, extent[other]))
        for low, high in ((0, cut), (cut, extent[other])):
            begin, size = list(start), list(extent)
            begin[other], size[other] = start[other] + low, high - low
            live = view(data, tuple(size), dtype)
            at += data.draw(st.sampled_from([0, 1, 3])) * w
            regions.append(Region(tile, tuple(begin), live, at))
            coords = np.indices(size).reshape(len(size), -1)
            inside = np.ravel_multi_index(
                tuple(c + b - s for c, b, s in zip(coords, begin, start, strict=True)), extent
            )
            wanted.append(
                np.stack(
                    (
                        np.zeros_like(inside),
                        segment + inside // SEGMENT_WORDS,
                        inside % SEGMENT_WORDS,
                        np.ravel_multi_index(tuple(c + b for c, b in zip(coords, begin, strict=True)), shape),
                        live.data_ptr() + (coords * np.array(live.stride())[:, None]).sum(axis=0) * w,
                        at + np.arange(len(inside)) * w,
                    ),
                    axis=1,
                )
            )
            at += len(inside) * w
        segment += -(-int(np.prod(extent)) // SEGMENT_WORDS)
    plan = plan_compact(w, [shape], tiles, regions, at)
    rows = np.concatenate(wanted)
    np.testing.assert_array_equal(words_of_pieces(plan), rows[np.lexsort((rows[:, 2], rows[:, 1]))])


def test_a_view_of_many_short_runs_is_planned_at_once() -> None:
    """All of them at once, over arrays: one by one they would take a minute, and the test's timeout is less than three."""
    live = torch.zeros((3, 701, 600), dtype=torch.int16).permute(2, 1, 0)
    shape = tuple(live.shape)
    tiles = Tiles(np.zeros(1, np.int64), np.zeros((1, 3), np.int64), np.array([shape]))
    plan = plan_compact(2, [shape], tiles, [Region(0, (0, 0, 0), live, 0)], live.numel() * 2)
    assert len(plan.rows) >= 600 * 701
    first = np.arange(600)[:, None] * 2 + np.arange(701)[None, :] * 1200  # of (i, j, 0), in bytes
    addresses = plan.rows[:, 0] - live.data_ptr()
    np.testing.assert_array_equal(addresses[np.append(True, np.diff(plan.rows[:, 10]) != 0)], first.reshape(-1))
