"""Compaction: the plain-torch specification against the canonical tensors, and the kernels' tables against memory."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from megasync.kernels.compact import STAGED_SPAN_NBYTES, compact_, compact_jobs_, staged_span_nbytes
from megasync.kernels.compact_feed import _pack
from megasync.kernels.compact_launch import Launches, _Pending
from megasync.kernels.compact_plan import plan_compact
from megasync.kernels.compact_runs import PIECE_VECTORS, Region, in_order, runs_of
from megasync.kernels.planes import WORD_DTYPES, segments_of
from megasync.kernels.scatter_plan import Tiles
from tests.gpu import compact_cases
from tests.gpu import kernel_cases as cases
from tests.gpu import kernel_checks as checks


@pytest.mark.parametrize("density", [0.001, 0.05, 0.6])
@pytest.mark.parametrize("w", [1, 2, 4, 8])
def test_planes_sums_and_snapshot_equal_the_oracle(w: int, density: float) -> None:
    checks.compact("cpu", w, density, seed=w, span_nbytes=300_000)


def _memory(address: int, nbytes: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=np.uint8)


@pytest.mark.parametrize("w", [1, 2, 4, 8])
def test_pieces_name_every_owned_word_once_with_its_live_and_old_bytes(w: int) -> None:
    case = compact_cases.compact_case(w, 0.3, seed=7)
    plan = case.plan
    _, _, words = segments_of(plan.tiles.words)
    seen = [np.zeros(n, dtype=np.int64) for n in words]
    snapshot = case.snapshot.numpy()
    for row, vector in zip(plan.rows, plan.vector_nbytes.tolist(), strict=True):
        live, step, m, s, per_row, begin, num, old_at, position, position_step, flat, flat_step, t, segment, _ = (
            row.tolist()
        )
        assert 0 < num <= PIECE_VECTORS
        assert live % vector == old_at % vector == step % vector == 0 or per_row * vector == step
        k = np.arange(begin, begin + num)
        r = (k * m) >> s
        c = k - r * per_row
        np.testing.assert_array_equal(r, k // per_row)
        words_of = c[:, None] * (vector // w) + np.arange(vector // w)
        at = (position + r[:, None] * position_step + words_of).ravel()
        number = (flat + r[:, None] * flat_step + words_of).ravel()
        seen[segment][at] += 1
        memory = _memory(live, int(r.max()) * step + per_row * vector)
        byte = (r * step + c * vector)[:, None] + np.arange(vector)
        np.testing.assert_array_equal(memory[byte].reshape(-1).view(f"<u{w}"), case.new[t].reshape(-1)[number])
        byte = old_at + k[:, None] * vector + np.arange(vector)
        np.testing.assert_array_equal(snapshot[byte].reshape(-1).view(f"<u{w}"), case.old[t].reshape(-1)[number])
    assert all(int(x.max()) <= 1 for x in seen)
    assert sum(int(x.sum()) for x in seen) == sum(int(o.sum()) for o in case.owned)
    assert (np.diff(plan.rows[:, 13]) >= 0).all()


@pytest.mark.parametrize("w", [1, 4])
def test_a_staging_slot_has_the_old_bytes_of_its_span(w: int) -> None:
    """Regions of a span may lie far apart in the snapshot; the slot holds them packed, aligned as they were."""
    rng = np.random.default_rng(w)
    live = torch.zeros((40, 3000 // w), dtype=WORD_DTYPES[w])
    shape = tuple(live.shape)
    tiles = Tiles(np.zeros(1, np.int64), np.zeros((1, 2), np.int64), np.array([shape]))
    offsets = rng.permutation(40) * 200_000 + rng.integers(0, 4, 40) * w
    regions = [Region(0, (i, 0), live[i : i + 1], int(offsets[i])) for i in range(40)]
    plan = plan_compact(w, [shape], tiles, regions, 40 * 200_000)
    snapshot = rng.integers(0, 256, 40 * 200_000, dtype=np.uint8)
    for span in plan.spans(30_000):
        packing = _pack(plan, span)
        assert packing.nbytes < 2 * 120_000
        slot = np.zeros(packing.nbytes, dtype=np.uint8)
        for begin, end, place in packing.up:
            assert place % 8 == begin % 8
            slot[place : place + end - begin] = snapshot[begin:end]
        back = np.full(len(snapshot), -1, dtype=np.int64)
        for begin, end, place in packing.down:
            back[begin:end] = slot[place : place + end - begin]
        owned = np.zeros(len(snapshot), dtype=np.bool_)
        rows, vector = plan.rows[slice(*span.pieces)], plan.vector_nbytes[slice(*span.pieces)]
        for row, v in zip(rows.tolist(), vector.tolist(), strict=True):
            owned[row[7] + row[5] * v : row[7] + (row[5] + row[6]) * v] = True
        np.testing.assert_array_equal(back, np.where(owned, snapshot.astype(np.int64), -1))
        pieces = slice(*span.pieces)
        for row, vector, at in zip(
            plan.rows[pieces], plan.vector_nbytes[pieces], packing.offsets.tolist(), strict=True
        ):
            k = np.arange(row[5] * vector, (row[5] + row[6]) * vector)
            np.testing.assert_array_equal(slot[at + k], snapshot[row[7] + k])


def test_slots_are_a_part_of_what_they_stage() -> None:
    assert staged_span_nbytes(445 << 30) == STAGED_SPAN_NBYTES
    assert staged_span_nbytes(1 << 30) == 1 << 27
    assert staged_span_nbytes(0) == 64 << 20


def test_several_plans_in_one_pipeline() -> None:
    one, two = compact_cases.compact_case(1, 0.01, 1), compact_cases.compact_case(2, 0.01, 2)
    shared = torch.cat((one.snapshot, two.snapshot))
    moved = [Region(r.tile, r.start, r.live, r.snapshot_offset + one.snapshot.numel()) for r in two.plan.regions]
    plan = plan_compact(2, two.shapes, two.plan.tiles, moved, shared.numel())
    lanes = [torch.zeros((len(c.shapes), 4), dtype=torch.int64) for c in (one, two)]
    parts = list(compact_jobs_([(one.plan, lanes[0]), (plan, lanes[1])], shared, span_nbytes=300_000))
    for job, case in enumerate((one, two)):
        want, sums = compact_cases.compact_oracle(case)
        got = compact_cases.join([p.planes for p in parts if p.job == job])
        assert torch.equal(got.entries, want.entries)
        assert [cases.as_lanes(r) for r in lanes[job]] == sums


def test_case_52_strided_and_transposed_views_are_read_where_they_lie() -> None:
    whole = torch.arange(6 * 10, dtype=torch.int16).view(6, 10)
    region = Region(0, (0, 0), whole[:, 2:6], 0)
    (run,) = runs_of((6, 4), (0, 0), (6, 4), region).tolist()
    assert run[1:5] == [whole.data_ptr() + 4, 6, 4, 10]  # address, rows, words of a row, step
    (run,) = runs_of((10, 6), (0, 0), (10, 6), Region(0, (0, 0), whole.contiguous()[:, :6].t()[:6], 0))[:1].tolist()
    assert run[3] == 1
    (run,) = runs_of((60,), (0,), (60,), Region(0, (0,), whole.view(60), 0)).tolist()
    assert run[2:4] == [1, 60]


def test_two_regions_that_hold_one_word_are_refused() -> None:
    live = torch.zeros((4, 8), dtype=torch.uint8)
    region = Region(0, (0, 0), live, 0)
    runs = runs_of((4, 8), (0, 0), (4, 8), region)
    with pytest.raises(ValueError, match="one live place"):
        in_order(np.concatenate((runs, runs)), 1)


def test_what_does_not_fit_is_refused() -> None:
    live = torch.zeros((4, 8), dtype=torch.uint8)
    tiles = Tiles(np.zeros(1, np.int64), np.zeros((1, 2), np.int64), np.array([[4, 8]]))
    for region, reason in (
        (Region(0, (1, 0), live, 0), "leaves tile 0"),
        (Region(1, (0, 0), live, 0), "names tile 1 of 1"),
        (Region(0, (0, 0), live, 40), "takes snapshot bytes 40 to 72 of 64"),
        (Region(0, (0, 0), live.view(torch.int16), 0), "has 2-byte words, the plan 1"),
    ):
        with pytest.raises(ValueError, match=reason):
            plan_compact(1, [(4, 8)], tiles, [region], 64)
    plan = plan_compact(1, [(4, 8)], tiles, [Region(0, (0, 0), live, 0)], 64)
    lanes = torch.zeros((1, 4), dtype=torch.int64)
    with pytest.raises(ValueError, match="has 16 bytes, the plan reads 32"):
        compact_(plan, torch.zeros(16, dtype=torch.uint8), lanes)
    with pytest.raises(ValueError, match="lanes must be"):
        compact_(plan, torch.zeros(64, dtype=torch.uint8), lanes[:, :2])
    with pytest.raises(ValueError, match="at least 2"):
        compact_(plan, torch.zeros(64, dtype=torch.uint8), lanes, num_slots=1)


def test_a_device_that_fails_between_two_marks_ends_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans share marks; where the next mark cannot be made any more, no span is tried for ever."""
    case = compact_cases.compact_case(2, 0.01, seed=3)
    spans = case.plan.spans(100_000)
    assert len(spans) > 3
    lanes = torch.zeros((len(case.shapes), 4), dtype=torch.int64)
    launches = Launches([(case.plan, lanes)], case.snapshot, [(0, s) for s in spans], 0, None)
    none = torch.empty(0, dtype=torch.uint8)
    marks: list[int] = []

    def mark() -> None:
        marks.append(1)
        raise RuntimeError("event: illegal memory access")

    monkeypatch.setattr(launches, "_launch", lambda number, room: _Pending(number, room, none, none))
    monkeypatch.setattr(launches, "_mark", mark)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        list(launches.parts())
    assert len(marks) == len(spans)
