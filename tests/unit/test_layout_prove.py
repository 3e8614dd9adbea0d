"""Proofs by arithmetic against exhaustive enumeration of the same records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.errors import PlanError
from megasync.layout import Layout, Remap, arrange, prove, validate, validate_all, with_copies
from megasync.layout import experts as E
from megasync.layout.live import describe
from megasync.layout.views import box_offsets, physical_range, strided_parts
from tests.unit.layout_oracles import ALL, Case
from tests.unit.test_layout_modes import records


def offsets_of(r: Remap) -> np.ndarray:
    return np.concatenate([o for _, o in box_offsets(r)])


@given(records())
@settings(max_examples=100, deadline=None)
def test_one_to_one_and_range_agree_with_enumeration(r: Remap) -> None:
    offsets = offsets_of(r)
    assert prove.is_injective(r) is bool(np.unique(offsets).size == offsets.size)
    low, high = physical_range(r)
    assert low <= offsets.min()
    assert high >= offsets.max()
    layout = Layout(r.shape, 2, r.start, r.stop, (r,))
    if strided_parts(layout, r) is not None:
        assert (low, high) == (offsets.min(), offsets.max())


@given(records(), st.data())
@settings(max_examples=100, deadline=None)
def test_strided_parts_are_the_record(r: Remap, data: st.DataObject) -> None:
    layout = Layout(r.shape, 2, r.start, r.stop, (r,))
    parts = strided_parts(layout, r)
    if parts is None:
        return
    expected = {}
    for coords, offsets in box_offsets(r):
        local = [c - s for c, s in zip(coords, layout.start, strict=True)]
        expected |= dict(zip(np.ravel_multi_index(local, layout.slice_shape).tolist(), offsets.tolist(), strict=True))
    found = {}
    for p in parts:
        where = np.indices(p.extents).reshape(len(p.extents), -1) if p.extents else np.zeros((0, 1), int)
        source = p.slice_offset + sum((w * s for w, s in zip(where, p.slice_strides, strict=True)), np.zeros(1, int))
        place = p.live_offset + sum((w * s for w, s in zip(where, p.live_strides, strict=True)), np.zeros(1, int))
        found |= dict(zip(source.tolist(), place.tolist(), strict=True))
    assert found == expected


@given(records(), records())
@settings(max_examples=120, deadline=None)
def test_apartness_agrees_with_enumeration(a: Remap, b: Remap) -> None:
    meet = np.intersect1d(offsets_of(a), offsets_of(b)).size > 0
    assert prove.are_apart(a, b) is (not meet)


@st.composite
def lattices(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    strides = draw(st.sets(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24, 36, 48]), max_size=4))
    return draw(st.integers(0, 60)), sorted((s, draw(st.integers(2, 4))) for s in strides)


def sums(lattice: tuple[int, list[tuple[int, int]]]) -> np.ndarray:
    out = np.array([lattice[0]])
    for stride, count in lattice[1]:
        out = (out[:, None] + np.arange(count) * stride).reshape(-1)
    return out


@given(lattices(), lattices())
@settings(max_examples=150, deadline=None)
def test_what_lattices_prove_is_true(
    one: tuple[int, list[tuple[int, int]]], two: tuple[int, list[tuple[int, int]]]
) -> None:
    if prove._lattices_apart(one, two):
        assert not np.intersect1d(sums(one), sums(two)).size
    if prove._stacked(one[1]):
        assert np.unique(sums(one)).size == sums(one).size


@pytest.mark.parametrize(
    ("one", "two", "apart"),
    [
        ((0, [(1, 4)]), (4, [(1, 4)]), True),
        ((0, [(1, 5)]), (4, [(1, 4)]), False),
        ((0, [(1, 4), (8, 3)]), (4, [(1, 4), (8, 3)]), True),
        ((0, [(1, 4), (8, 3)]), (4, [(1, 5), (8, 3)]), False),  # 4 + 4 = 8
        ((0, [(1, 4), (8, 3)]), (3, [(1, 4), (8, 3)]), False),
        ((2, [(12, 3)]), (3, [(12, 3), (4, 2)]), True),
        ((0, [(2, 3), (3, 2)]), (1, [(12, 2)]), True),  # 0 2 4 3 5 7 and 1 13
        ((0, [(4, 2), (16, 2)]), (0, [(1, 2), (2, 2), (3, 2)]), False),
    ],
)
def test_lattices_that_touch_are_not_told_apart(
    one: tuple[int, list[tuple[int, int]]], two: tuple[int, list[tuple[int, int]]], apart: bool
) -> None:
    assert (not np.intersect1d(sums(one), sums(two)).size) is apart
    if not apart:
        assert not prove._lattices_apart(one, two)


@pytest.mark.parametrize(
    "build",
    [
        lambda part: E.w13_interleaved(part, (160, 450), E.Place(0, 4), "s", word_nbytes=1, scales=True),
        lambda part: E.w13_stack(part, (768, 2048), E.Place(3, 8), "s", word_nbytes=2),
        lambda part: E.w13_trtllm(part, (256, 512), E.Place(0, 4), "s", word_nbytes=2, steps=E.block_major(32, 64)),
    ],
)
def test_gate_and_up_are_told_apart_without_enumeration(
    build: Callable[[str], Layout], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prove, "ENUMERATION_LIMIT", 0)
    gate, up = build("gate").records[0], build("up").records[0]
    assert prove.is_injective(gate) is True
    assert prove.are_apart(gate, up) is True
    assert prove.are_apart(gate, gate) is None


def test_odd_digits_of_large_records_are_refused_rather_than_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = arrange((64, 64), word_nbytes=1).to("s", strides=(63, 2))
    assert prove.is_injective(layout.records[0]) is False  # (2, 0) and (0, 63): 126
    monkeypatch.setattr(prove, "ENUMERATION_LIMIT", 100)
    with pytest.raises(PlanError, match="cannot be proved"):
        validate(layout, {"s": 10_000})


def test_what_validate_refuses() -> None:
    whole = arrange((8, 6), word_nbytes=2)
    good = whole.to("s")
    validate(good, {"s": 96})
    with pytest.raises(PlanError, match="no live storage"):
        validate(good, {"t": 96})
    with pytest.raises(PlanError, match="leave live storage"):
        validate(good, {"s": 94})
    with pytest.raises(PlanError, match="leave live storage"):
        validate(whole.to("s", base=-1), {"s": 96})
    with pytest.raises(PlanError, match="two words to one place"):
        validate(whole.to("s", strides=(3, 1)), {"s": 96})
    half = arrange((8, 6), word_nbytes=2, start=(0, 0), stop=(4, 6)).to("s").records
    with pytest.raises(PlanError, match="hold 24 of the 48 words"):
        validate(replace(good, records=half), {"s": 96})
    validate(replace(good, records=half, partial=True), {"s": 96})
    with pytest.raises(PlanError, match="two primaries"):
        validate(replace(good, records=(*half, *whole.to("t").records)), {"s": 96, "t": 96})
    with pytest.raises(PlanError, match="share places"):
        validate(with_copies(good, whole.to("s", base=47)), {"s": 400})
    with pytest.raises(PlanError, match="layouts of a and b share places"):
        validate_all({"a": good, "b": whole.to("s", base=40)}, {"s": 400})


def test_nibbles_and_words_of_one_storage_are_compared() -> None:
    words = arrange((4, 8), word_nbytes=2).to("s")
    nibbles = arrange((4, 8), word_nbytes=1, unit="nibble").to("s", base=4 * 8 * 4)
    validate_all({"a": words, "b": nibbles}, {"s": 96})
    with pytest.raises(PlanError, match="share places"):
        validate_all({"a": words, "b": replace_base(nibbles, 4 * 8 * 4 - 1)}, {"s": 96})


def replace_base(layout: Layout, base: int) -> Layout:
    return replace(layout, records=tuple(replace(r, base=base) for r in layout.records))


def test_replicas_without_a_primary_must_hold_the_slice() -> None:
    layout = arrange((8, 6), word_nbytes=2).to("s", primary=False)
    validate(layout, {"s": 96})
    assert layout.leading() == layout.records


def test_a_stack_of_256_experts_is_proved_by_a_sweep() -> None:
    layouts = {}
    for e in range(256):
        for part in ("gate", "up"):
            layouts[f"{e}.{part}"] = E.w13_interleaved(
                part, (1024, 448), E.Place(e, 256), "w13", word_nbytes=1, scales=True
            )
    validate_all(layouts, {"w13": 256 * 2048 * 448})
    with pytest.raises(PlanError, match="leave live storage"):
        validate_all(layouts, {"w13": 256 * 2048 * 448 - 1})


@pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)
def test_named_layouts_are_proved_by_arithmetic_alone(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove, "ENUMERATION_LIMIT", 0)
    live = case.load({n: torch.zeros(s, dtype=d) for n, (s, d) in case.specs.items()})
    validate_all(case.layouts, {r.storage: r.storage_nbytes for r in describe(live)})
