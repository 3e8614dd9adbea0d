"""Packed records, tables and walks: against the layout floor's own evaluators, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megasync.kernels.planes import planes_reference, segments_of
from megasync.kernels.records import PackedRecords, magic, pack_records, storage_bytes
from megasync.kernels.scatter import SUMS_ALL, new_lanes, scatter_xor_
from megasync.kernels.scatter_plan import Tiles, plan_scatter
from megasync.kernels.scatter_stream import chunks_of
from megasync.kernels.walk import audit_, dense_xor_
from megasync.kernels.walk_plan import plan_audit, plan_dense
from megasync.layout import experts, named
from megasync.layout.compose import arrange
from megasync.layout.evaluate import gather
from megasync.layout.modes import Layout
from tests.gpu import kernel_cases as cases

LAYOUTS: dict[str, tuple[Callable[[], Layout], bool]] = {
    "column": (lambda: named.column_parallel((64, 96), word_nbytes=2, storage="s", tp_rank=1, tp_size=4), True),
    "row": (lambda: named.row_parallel((64, 96), word_nbytes=2, storage="s", tp_rank=2, tp_size=3), True),
    "vocab": (
        lambda: named.column_parallel((90, 32), word_nbytes=4, storage="s", tp_rank=0, tp_size=2),
        True,
    ),
    "swizzled scales": (lambda: named.swizzled_scales(arrange((160, 48), word_nbytes=1), "s"), True),
    "swizzled scales, ragged": (lambda: named.swizzled_scales(arrange((100, 10), word_nbytes=1), "s"), False),
    "transposed": (lambda: named.transposed(arrange((64, 48), word_nbytes=2), "s"), False),
    "shuffled rows": (lambda: named.shuffled_rows(arrange((64, 64), word_nbytes=1), "s"), True),
    "shuffled swizzled": (lambda: named.shuffled_swizzled_scales(arrange((128, 64), word_nbytes=1), "s"), True),
    "interleaved": (
        lambda: experts.w13_interleaved("gate", (128, 64), experts.Place(1, 3), "s", word_nbytes=1),
        True,
    ),
    "interleaved scales": (
        lambda: experts.w13_interleaved("up", (256, 32), experts.Place(2, 3), "s", word_nbytes=1, scales=True),
        True,
    ),
    "w2 stack": (lambda: experts.w2_stack((64, 128), experts.Place(1, 2, 1, 2), "s", word_nbytes=1), True),
    "marlin nibbles": (lambda: named.marlin_nibbles((128, 64), storage="s"), False),
}


def _storage(layout: Layout, rng: np.random.Generator) -> torch.Tensor:
    """Random bytes as large as the records need."""
    units = 0
    for r in layout.records:
        box = [np.arange(a, b) for a, b in zip(r.start, r.stop, strict=True)]
        coords = [x.ravel() for x in np.meshgrid(*box, indexing="ij")]
        units = max(units, int(r.offsets(coords)[1].max()) + 1)
    nbytes = (units + 1) // 2 if layout.records[0].unit == "nibble" else units * layout.word_nbytes
    return torch.from_numpy(rng.integers(0, 256, -(-nbytes // 16) * 16, dtype=np.uint8))


def _canonical(layout: Layout, live: torch.Tensor) -> np.ndarray:
    """The rank's slice, read by the layout floor."""
    return (
        gather(layout, {"s": live}).contiguous().view(torch.uint8).numpy().reshape(-1).view(f"<u{layout.word_nbytes}")
    )


def _packed(layout: Layout, live: torch.Tensor) -> PackedRecords:
    return pack_records(layout.word_nbytes, [layout.shape], [layout.records], {"s": live})


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_named_layouts(name: str) -> None:
    """Scatter, dense XOR and audit through every named layout; aligned ones stream."""
    make, streams = LAYOUTS[name]
    layout = make()
    rng = np.random.default_rng(1)
    live = _storage(layout, rng)
    w, shape = layout.word_nbytes, layout.shape
    before = _canonical(layout, live)
    records = _packed(layout, live)
    mask = np.where(rng.random(shape) < 0.1, cases.random_words(prod(shape), w, rng).reshape(shape), 0).astype(f"<u{w}")
    inside = tuple(slice(a, b) for a, b in zip(layout.start, layout.stop, strict=True))
    want = before ^ mask[inside].reshape(-1)
    axes = records.num_axes
    tiles = Tiles(np.zeros(1, dtype=np.int64), np.zeros((1, axes), dtype=np.int64), np.array([shape]))
    at = np.nonzero(mask.reshape(-1))[0]
    planes = planes_reference(at // 65_536, at % 65_536, mask.reshape(-1)[at], segments_of(tiles.words)[2], w)
    plan = plan_scatter(tiles, planes.counts.numpy(), records)
    audit = plan_audit(records)
    assert bool(audit.fast) == streams
    first, second, changed = new_lanes(plan), new_lanes(plan), new_lanes(plan)
    audit_(audit, first)
    scatter_xor_(plan, planes, changed, sums=SUMS_ALL)
    np.testing.assert_array_equal(_canonical(layout, live), want)
    audit_(audit, second)
    assert torch.equal(second[:, :2], first[:, :2] + changed[:, 2:])
    flat = np.arange(prod(shape)).reshape(shape)[inside].reshape(-1)
    assert cases.as_lanes(first[0])[0] == cases.WordWeights.of(flat, w).lanes(before)
    again = new_lanes(plan)
    dense_xor_(plan_dense(tiles, np.zeros(1, dtype=np.int64), records), torch.from_numpy(_padded(mask)), again)
    np.testing.assert_array_equal(_canonical(layout, live), before)
    assert torch.equal(again[:, 2:], -changed[:, 2:])


def _padded(mask: np.ndarray) -> np.ndarray:
    """Bytes of a mask in a buffer that starts on 16 bytes."""
    out = np.zeros(mask.nbytes + 32, dtype=np.uint8)
    skip = -out.ctypes.data % 16
    out[skip : skip + mask.nbytes] = mask.reshape(-1).view(np.uint8)
    return out[skip:]


@given(st.integers(1, 1 << 31), st.integers(0, (1 << 31) - 1))
def test_magic_division_is_exact(divisor: int, n: int) -> None:
    m, s = magic(divisor)
    assert m < 1 << 33
    assert n * m < 1 << 63
    for x in (n, n // divisor * divisor, max(0, n // divisor * divisor - 1)):
        assert (x * m) >> s == x // divisor


def test_storage_bytes_covers_the_whole_storage() -> None:
    whole = torch.arange(12, dtype=torch.int32)
    flat = storage_bytes(whole[4:8].view(2, 2).t())
    assert flat.numel() == 48
    flat[0] = 99
    assert int(whole[0]) == 99


def test_a_record_that_can_leave_its_storage_is_refused() -> None:
    record = cases.remap((8, 8), (0, 0), (8, 8), [(0, 0, 1, 8), (1, 0, 1, 1)], base=1)
    with pytest.raises(ValueError, match="reaches units 1 to 64 of storage 's', which has 64"):
        pack_records(1, [(8, 8)], [[record]], {"s": torch.zeros(64, dtype=torch.uint8)})


def test_a_record_of_another_tensor_or_storage_is_refused() -> None:
    record = cases.remap((8, 8), (0, 0), (8, 8), [(0, 0, 1, 8), (1, 0, 1, 1)])
    live = {"s": torch.zeros(64, dtype=torch.uint8)}
    with pytest.raises(ValueError, match="the tensor is"):
        pack_records(1, [(8, 9)], [[record]], live)
    with pytest.raises(ValueError, match="names storage"):
        pack_records(1, [(8, 8)], [[record]], {"other": live["s"]})
    with pytest.raises(ValueError, match="not on 4 bytes"):
        pack_records(1, [(8, 8)], [[record]], {"s": _misaligned(64)})


def _misaligned(n: int) -> torch.Tensor:
    """A tensor whose storage itself starts one byte off."""
    data = np.zeros(n + 8, dtype=np.uint8)
    skip = 1 + (-data.ctypes.data % 4)
    return torch.from_numpy(data[skip : skip + n])


def test_tiles_and_counts_that_do_not_fit_are_refused() -> None:
    record = cases.remap((8, 8), (0, 0), (8, 8), [(0, 0, 1, 8), (1, 0, 1, 1)])
    records = pack_records(1, [(8, 8)], [[record]], {"s": torch.zeros(64, dtype=torch.uint8)})
    whole = Tiles(np.zeros(1, np.int64), np.zeros((1, 2), np.int64), np.array([[8, 8]]))
    past = Tiles(np.zeros(1, np.int64), np.array([[4, 0]]), np.array([[8, 8]]))
    with pytest.raises(ValueError, match="outside its shape"):
        plan_scatter(past, np.array([1]), records)
    for counts in ([65], [-1], [1, 1], []):
        with pytest.raises(ValueError, match="counts do not fit"):
            plan_scatter(whole, np.array(counts, dtype=np.int64), records)
    plan = plan_scatter(whole, np.array([1]), records)
    short = cases.Planes(
        1, torch.ones(1), torch.zeros((3, 2), dtype=torch.uint8), torch.zeros((1, 0), dtype=torch.uint8)
    )
    with pytest.raises(ValueError, match="do not fit the plan"):
        scatter_xor_(plan, short)


def test_chunks_hold_whole_segments_and_fit_their_slot() -> None:
    case = cases.scatter_case(1, 0.9, 3)
    for launch in case.plan.launches:
        chunks = chunks_of(launch, 65_536)
        assert [a for a, _ in chunks[1:]] == [b for _, b in chunks[:-1]]
        assert (chunks[0][0], chunks[-1][1]) == (0, len(launch.segments))
        for a, b in chunks:
            assert b - a == 1 or launch.first_dense[b] - launch.first_dense[a] <= 65_536
