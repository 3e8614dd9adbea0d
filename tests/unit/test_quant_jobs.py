"""Regions that a rank reads once for codes and scales, however the two are cut and owned."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.errors import PlanError
from megasync.quant import nvfp4
from megasync.quant.checkpoint import QuantisedWeight, QuantRule, describe
from megasync.quant.formulas import formula
from megasync.quant.jobs import Owned, jobs_of, subtract
from megasync.quant.passes import Passes
from megasync.types import Box, TensorSpec
from tests.golden.quant_inputs import bell

ROWS, COLUMNS = 96, 128


def _boxes(row_cuts: list[int], column_cuts: list[int]) -> list[Box]:
    rows, columns = sorted({0, ROWS, *row_cuts}), sorted({0, COLUMNS, *column_cuts})
    return [
        Box((a, c), (b - a, d - c))
        for a, b in zip(rows, rows[1:], strict=False)
        for c, d in zip(columns, columns[1:], strict=False)
    ]


def _owned(weight: QuantisedWeight, role: str, regions: list[Box]) -> list[Owned]:
    member = next(m for m in weight.members if m.role == role)
    boxes = [weight.member_box(member, r) for r in regions]
    return [
        Owned(member, b, r, torch.full(b.extent, 99, dtype=torch.uint8)) for b, r in zip(boxes, regions, strict=True)
    ]


CUTS = st.lists(st.integers(0, 5).map(lambda n: n * 16), max_size=3)


@settings(max_examples=60, deadline=None)
@given(
    rows=CUTS, columns=CUTS, scale_rows=CUTS, scale_columns=CUTS, keep=st.integers(0, 2**16 - 1), split=st.booleans()
)
def test_every_owned_byte_is_made_and_every_element_read_once(
    rows: list[int], columns: list[int], scale_rows: list[int], scale_columns: list[int], keep: int, split: bool
) -> None:
    f = formula("nvfp4/te-2d")
    weight = describe(TensorSpec("m.w.weight", "BF16", (ROWS, COLUMNS)), QuantRule("*", f.id))
    data = torch.from_numpy(bell(ROWS, COLUMNS, 3)).to(torch.bfloat16)
    codes = [b for i, b in enumerate(_boxes(rows, columns)) if keep >> i & 1 or not keep & 1]
    scales = [b for i, b in enumerate(_boxes(scale_rows, scale_columns)) if keep >> (8 + i) & 1 or not keep & 2]
    owned = _owned(weight, "codes", codes) + _owned(weight, "scales", scales)
    whole = Box((0, 0), (ROWS, COLUMNS))
    jobs = jobs_of(
        weight, 0, owned, [(whole, data)] if not split else [(Box((0, 0), (48, 128)), data[:48]), (whole, data)]
    )
    seen = torch.zeros(ROWS, COLUMNS, dtype=torch.int32)
    for job in jobs:
        at = job.data.storage_offset()
        seen[at // COLUMNS : at // COLUMNS + job.data.shape[0], at % COLUMNS : at % COLUMNS + job.data.shape[1]] += 1
    wanted = torch.zeros_like(seen)
    for box in codes + scales:
        a, b = box.start
        wanted[a : a + box.extent[0], b : b + box.extent[1]] = 1
    assert torch.equal(seen, wanted)
    passes = Passes(jobs, [], 1, "cpu")
    assert passes.nbytes.quantise_read == 2 * int(wanted.sum())
    assert passes.nbytes.amax_read == 2 * sum(b.num_words for b in codes)
    amax = nvfp4.amax(data)
    passes.fill(amax.reshape(1))
    q = nvfp4.quantize(data, amax, f)
    for o in owned:
        full = q.codes if o.member.role == "codes" else q.scales
        at = tuple(slice(a, a + n) for a, n in zip(o.box.start, o.box.extent, strict=True))
        assert torch.equal(o.buffer, full[at])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=8, max_size=8))
def test_subtracting_a_box_leaves_the_rest_once(n: list[int]) -> None:
    box, hole = Box((n[0], n[1]), (n[2] + 1, n[3] + 1)), Box((n[4], n[5]), (n[6] + 1, n[7] + 1))
    grid = torch.zeros(20, 20, dtype=torch.int32)
    for part in subtract(box, hole):
        grid[part.start[0] : part.start[0] + part.extent[0], part.start[1] : part.start[1] + part.extent[1]] += 1
    want = torch.zeros_like(grid)
    want[box.start[0] : box.start[0] + box.extent[0], box.start[1] : box.start[1] + box.extent[1]] = 1
    want[hole.start[0] : hole.start[0] + hole.extent[0], hole.start[1] : hole.start[1] + hole.extent[1]] = 0
    assert torch.equal(grid, want)


def test_a_region_of_nobody_is_named() -> None:
    weight = describe(TensorSpec("m.w.weight", "BF16", (ROWS, COLUMNS)), QuantRule("*", "nvfp4/te-2d"))
    owned = _owned(weight, "codes", [Box((0, 0), (48, 128))])
    with pytest.raises(PlanError, match=r"region \[0, 0\]\+\[48, 128\] of m\.w\.weight lies in no local piece"):
        jobs_of(weight, 0, owned, [(Box((0, 0), (32, 128)), torch.zeros(32, 128, dtype=torch.bfloat16))])
