"""Checks of the Triton kernels against the oracles: run on a GPU by tests/gpu, on the CPU in Triton's interpreter.

``python -m tests.gpu.kernel_checks NAME...`` runs checks in the interpreter; TRITON_INTERPRET=1 must be set.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch

from megasync.kernels import compact_launch, dispatch
from megasync.kernels.compact import compact_, compact_jobs_
from megasync.kernels.compact_plan import plan_compact
from megasync.kernels.compact_runs import Region
from megasync.kernels.planes import Planes, planes_reference, segments_of
from megasync.kernels.records import pack_records
from megasync.kernels.scatter import SUMS_ALL, SUMS_NEW, new_lanes, scatter_xor_, touched_sums_
from megasync.kernels.scatter_plan import Tiles, plan_scatter
from megasync.kernels.scatter_stream import EntryRing, scatter_xor_streamed_
from megasync.kernels.walk import audit_, dense_sums_, dense_xor_
from megasync.kernels.walk_plan import plan_audit, plan_dense
from megasync.tiles import make_grid
from megasync.types import Lanes
from tests.gpu import compact_cases, walk_cases
from tests.gpu import kernel_cases as cases


def scatter(device: str, w: int, density: float, seed: int = 0) -> None:
    """Apply, sums, check without writing, and undo."""
    case = cases.scatter_case(w, density, seed, device)
    after, sums = cases.oracle(case)
    before = {k: v.clone() for k, v in case.storages.items()}
    checked, faults = new_lanes(case.plan), torch.zeros(1, dtype=torch.int32, device=device)
    touched_sums_(case.plan, case.planes, checked, faults)
    assert int(faults) == 0
    assert [cases.as_lanes(r) for r in checked.cpu()] == sums
    assert all(torch.equal(case.storages[k], before[k]) for k in before)
    lanes = new_lanes(case.plan)
    scatter_xor_(case.plan, case.planes, lanes)
    assert [cases.as_lanes(r)[1] for r in lanes.cpu()] == [s[1] for s in sums]
    for name, want in after.items():
        np.testing.assert_array_equal(case.storages[name].cpu().numpy(), want, err_msg=name)
    back = new_lanes(case.plan)
    scatter_xor_(case.plan, case.planes, back, sums=SUMS_NEW)
    assert [cases.as_lanes(r) for r in back.cpu()] == [(s[0], Lanes()) for s in sums]
    assert all(torch.equal(case.storages[k], before[k]) for k in before)


def compact(
    device: str,
    w: int,
    density: float,
    seed: int = 0,
    span_nbytes: int | None = None,
    pinned: bool = False,
    tiny: bool = False,
) -> None:
    """Planes, sums and snapshot of every span; a second pass finds nothing."""
    case = compact_cases.compact_case(w, density, seed, device, tiny, pinned)
    want, sums = compact_cases.compact_oracle(case)
    lanes = torch.zeros((len(case.shapes), 4), dtype=torch.int64, device=device)
    parts = list(compact_(case.plan, case.snapshot, lanes, span_nbytes=span_nbytes))
    got = compact_cases.join([p.planes for p in parts])
    assert torch.equal(got.counts, want.counts)
    assert torch.equal(got.entries, want.entries)
    assert torch.equal(got.dense, want.dense)
    assert [cases.as_lanes(r) for r in lanes.cpu()] == sums
    assert compact_cases.updated(case)
    again = compact_cases.join([p.planes for p in compact_(case.plan, case.snapshot, lanes)])
    assert int(again.counts.sum()) == 0
    assert [cases.as_lanes(r) for r in lanes.cpu()] == sums


def compact_tiny(device: str) -> None:
    """All word sizes, dense, sparse and unchanged segments."""
    for w in (1, 2, 4, 8):
        compact(device, w, 0.001, span_nbytes=40_000, tiny=True)


def compact_rooms(device: str, pinned: bool = False) -> None:
    """Spans with more words than they have room for are done again; an error in between loses nothing that was queued."""
    for w in (1, 2):
        case = compact_cases.compact_case(w, 0.001, 3, device, True, pinned)
        want, sums = compact_cases.compact_oracle(case)
        _too_little_room(case, want, sums)
        _breaks_off(compact_cases.compact_case(w, 0.001, 3, device, True, pinned), want)


def _too_little_room(case: compact_cases.CompactCase, want: Planes, sums: list[Any]) -> None:
    spans = case.plan.spans(40_000)
    case.plan.rooms.update({span: i % 3 for i, span in enumerate(spans)})
    lanes = torch.zeros((len(case.shapes), 4), dtype=torch.int64, device=case.plan.device)
    calls: list[int] = []
    jobs = [(case.plan, lanes)]
    parts = list(compact_jobs_(jobs, case.snapshot, span_nbytes=40_000, queued=lambda: calls.append(1)))
    assert [p.span for p in parts] == list(spans)
    assert len(spans) > 2
    assert len(calls) > 1
    got = compact_cases.join([p.planes for p in parts])
    assert all(torch.equal(a, b) for a, b in zip(_tensors(got), _tensors(want), strict=True))
    assert [cases.as_lanes(r) for r in lanes.cpu()] == sums
    assert compact_cases.updated(case)
    dense = [bool(p.planes.dense.numel()) for p in parts]
    assert [case.plan.rooms[s] == -1 for s in spans] == dense


def _breaks_off(case: compact_cases.CompactCase, want: Planes) -> None:
    lanes = torch.zeros((len(case.shapes), 4), dtype=torch.int64, device=case.plan.device)
    spans = case.plan.spans(40_000)
    inner = compact_launch.Launches._launch

    def breaking(self: compact_launch.Launches, number: int, room: int) -> Any:
        if number == len(spans) - 1:
            raise MemoryError("no room for planes")
        return inner(self, number, room)

    parts: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compact_launch.Launches, "_launch", breaking)
        with pytest.raises(MemoryError, match="no room for planes"):
            parts.extend(compact_jobs_([(case.plan, lanes)], case.snapshot, span_nbytes=40_000))
    got = compact_cases.join([p.planes for p in parts])
    n, m = got.entries.shape[1], got.dense.shape[1]
    assert [p.span for p in parts] == list(spans[:-1])
    assert torch.equal(got.entries, want.entries[:, :n])
    assert torch.equal(got.dense, want.dense[:, :m])


def _tensors(planes: Planes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return planes.counts, planes.entries, planes.dense


def walk(device: str, w: int, density: float, seed: int = 0, tiny: bool = False) -> None:
    """Audit, dense XOR with sums, audit again, and the XOR undone."""
    case = walk_cases.walk_case(w, density, seed, device, tiny)
    plan = plan_audit(case.records)
    lanes = torch.zeros((len(case.tensors), 4), dtype=torch.int64, device=device)
    audit_(plan, lanes)
    assert [cases.as_lanes(r)[0] for r in lanes.cpu()] == walk_cases.audit_oracle(case)
    after, sums = cases.oracle(walk_cases.dense_as_scatter(case))
    before = {k: v.clone() for k, v in case.storages.items()}
    dense = plan_dense(case.tiles, case.offsets, case.records)
    assert dense.fast
    assert tiny or dense.slow
    changed, read = torch.zeros_like(lanes), torch.zeros_like(lanes)
    dense_sums_(dense, case.mask, read)
    assert all(torch.equal(case.storages[k], before[k]) for k in before)
    dense_xor_(dense, case.mask, changed)
    assert torch.equal(read, changed)
    assert [cases.as_lanes(r) for r in changed.cpu()] == sums
    for name, want in after.items():
        np.testing.assert_array_equal(case.storages[name].cpu().numpy(), want, err_msg=name)
    again = torch.zeros_like(lanes)
    audit_(plan, again)
    assert torch.equal(again[:, :2], lanes[:, :2] + changed[:, 2:])
    dense_xor_(dense, case.mask)
    assert all(torch.equal(case.storages[k], before[k]) for k in before)
    news = torch.zeros_like(lanes)
    dense_xor_(dense, case.mask, news, after=True)
    assert torch.equal(news[:, :2], changed[:, :2] + changed[:, 2:])
    assert not bool(news[:, 2:].any())
    for name, want in after.items():
        np.testing.assert_array_equal(case.storages[name].cpu().numpy(), want, err_msg=name)


def walk_tiny(device: str) -> None:
    """Bytes and 2-byte words: pieces of 4 and of 8 bytes. The other sizes run on a GPU."""
    for w in (1, 2):
        walk(device, w, 0.01, tiny=True)


def streamed(w: int, density: float, seed: int = 0) -> None:
    """Entries in pinned memory through a ring far smaller than they are."""
    case = cases.scatter_case(w, density, seed, "cuda")
    after, sums = cases.oracle(case)
    entries, dense = case.planes.entries.cpu().pin_memory(), case.planes.dense.cpu().pin_memory()
    planes = Planes(w, case.planes.counts, entries, dense)
    ring = EntryRing(w, torch.device("cuda", torch.cuda.current_device()), chunk_entries=65_536, num_slots=2)
    lanes = new_lanes(case.plan)
    scatter_xor_streamed_(case.plan, planes, ring, lanes, sums=SUMS_ALL)
    assert [cases.as_lanes(r) for r in lanes.cpu()] == sums
    for name, want in after.items():
        np.testing.assert_array_equal(case.storages[name].cpu().numpy(), want, err_msg=name)


def broken(device: str) -> None:
    """Gaps past the segment and zero values are counted; bytes outside the tile stay as they are."""
    case = cases.scatter_case(1, 0.003, 5, device)
    before = {k: v.clone() for k, v in case.storages.items()}
    case.planes.entries[1, -5:] = 255
    case.planes.entries[2, :3] = 0
    lanes, faults = new_lanes(case.plan), torch.zeros(1, dtype=torch.int32, device=device)
    touched_sums_(case.plan, case.planes, lanes, faults)
    assert int(faults) >= 8
    scatter_xor_(case.plan, case.planes)
    scatter_xor_(case.plan, case.planes)
    assert all(torch.equal(case.storages[k], before[k]) for k in before)


def large(device: str) -> None:
    """Words past 4 GiB, through records whose merged axes pass 2^31, and back through compaction and audit."""
    shape = (5, 1 << 20, 1024)
    if device == "cpu":  # numpy's zeros take no memory before they are written
        live = torch.from_numpy(np.zeros(5 << 30, dtype=np.uint8))
    else:
        live = torch.zeros(5 << 30, dtype=torch.uint8, device=device)
    merged = cases.remap(shape, (0, 0, 0), shape, [(0, 0, 1, 1)], merge=((0, 1, 2),))
    split = cases.remap(shape, (0, 0, 0), shape, [(0, 0, 1, 1 << 30), (1, 0, 1, 1024), (2, 0, 1, 1)])
    grid = make_grid(shape, 1)
    box = grid.box(grid.num_tiles - 1)
    tiles = Tiles(np.zeros(1, dtype=np.int64), np.array([box.start]), np.array([box.extent]))
    words = box.num_words
    at = np.array([0, 70_000, words - 1])
    value = np.array([7, 8, 9], dtype=np.uint8)
    _, _, sizes = segments_of(tiles.words)
    planes = planes_reference(at // 65_536, at % 65_536, value, sizes, 1)
    planes = Planes(1, planes.counts, planes.entries.to(device), planes.dense.to(device))
    flat = ((5 << 30) - words) + at
    weights = cases.WordWeights.of(flat, 1)
    for record in (merged, split):
        records = pack_records(1, [shape], [[record]], {"s": live})
        plan = plan_scatter(tiles, planes.counts.numpy(), records)
        lanes = new_lanes(plan)
        scatter_xor_(plan, planes, lanes)
        assert torch.nonzero(live[-words:])[:, 0].tolist() == at.tolist()
        assert live[torch.from_numpy(flat).to(device)].tolist() == value.tolist()
        assert cases.as_lanes(lanes[0].cpu())[1] == weights.lanes(value)
        if device != "cpu":
            audited = new_lanes(plan)
            audit_(plan_audit(records), audited)
            assert torch.equal(audited[:, :2], lanes[:, 2:])
        view = live.view(shape)[tuple(slice(a, a + n) for a, n in zip(box.start, box.extent, strict=True))]
        compaction = plan_compact(1, [shape], tiles, [Region(0, box.start, view, 0)], words)
        found = torch.zeros_like(lanes)
        (part,) = compact_(compaction, torch.zeros(words, dtype=torch.uint8, device=device), found)
        assert torch.equal(part.planes.entries, planes.entries)
        assert torch.equal(found, lanes)
        scatter_xor_(plan, planes)
        assert int(live[-words:].count_nonzero()) == 0


def scatter_tiny(device: str) -> None:
    """All word sizes, few words."""
    for w in (1, 2, 4, 8):
        scatter(device, w, 0.0006)


if __name__ == "__main__":
    dispatch.uses_triton = lambda device: True
    for name in sys.argv[1:]:
        globals()[name]("cpu")
        print(name, "ok", flush=True)
