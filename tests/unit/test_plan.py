"""The ownership plan: every word owned once by a rank that holds it, whatever the layout; gaps and overlaps; balance."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.bench import moe_shapes
from megasync.errors import PlanError
from megasync.schema import Schema
from megasync.trainer.plan import OwnershipPlan, make_plan
from megasync.trainer.plan_holdings import Holdings
from megasync.trainer.plan_merge import describe, merge
from megasync.types import Box, TensorSpec

Held = list[tuple[str, Box]]


def holdings_of(specs: list[TensorSpec], ranks: list[Held]) -> tuple[Schema, Holdings]:
    """As the exchange makes it: a rank describes the tensors that it holds a part of."""
    classes: dict[bytes, list[int]] = {}
    for rank, held in enumerate(ranks):
        names = {name for name, _ in held}
        own = [s for s in specs if s.name in names or (not s.num_words and rank == 0)]
        classes.setdefault(describe(own, held), []).append(rank)
    return merge("run", [(r, d) for d, r in classes.items()])


def whole(spec: TensorSpec) -> Box:
    return Box((0,) * len(spec.shape), spec.shape)


def slab(spec: TensorSpec, axis: int, start: int, stop: int) -> Box:
    begin, extent = [0] * len(spec.shape), list(spec.shape)
    begin[axis], extent[axis] = start, stop - start
    return Box(tuple(begin), tuple(extent))


def check(plan: OwnershipPlan, ranks: list[Held]) -> None:
    """Every word once, inside its tile, on a rank that holds it; loads and order as promised."""
    schema = plan.schema
    count = [
        np.zeros(g.shape if t.num_words else (0,), dtype=np.uint8)
        for t, g in zip(schema.tensors, schema.grids, strict=True)
    ]
    for rank, held in enumerate(ranks):
        owned = plan.owned(rank)
        keys = list(zip(owned.tensor_ids.tolist(), owned.tiles.tolist(), strict=True))
        assert keys == sorted(set(keys))
        assert owned.nbytes == plan.loads[rank]
        units = owned.box_units.tolist()
        for i, (box, (name, named)) in enumerate(zip(owned.boxes(), owned.named_boxes(), strict=True)):
            tensor_id, tile = keys[units[i]]
            spec = schema.tensors[tensor_id]
            assert spec.name == name
            assert named == (box if spec.shape else Box((), ()))
            cell = schema.grids[tensor_id].box(tile)
            assert cell.intersect(box) == box
            assert tuple(owned.tile_starts[i][-len(cell.start) :]) == cell.start
            assert bool(owned.whole[i]) == (box == cell)
            assert any(n == name and (not spec.shape or b.intersect(box) == box) for n, b in held)
            count[tensor_id][tuple(slice(s, s + e) for s, e in zip(box.start, box.extent, strict=True))] += 1
    for spec, seen in zip(schema.tensors, count, strict=True):
        assert (seen == (0 if spec.frozen else 1)).all(), spec
    assert plan.loads.sum() == sum(t.nbytes for t in schema.tensors if not t.frozen)


SHAPES = [(), (0,), (7, 0), (5,), (300_001,), (512, 512), (3 * 64, 1024), (50_257, 9), (4, 300, 256), (2, 3, 4, 5)]
DTYPES = ["BF16", "U8", "F32", "F64"]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[TensorSpec], list[Held]]:
    """Tensors, each replicated, cut unevenly, cut on two axes, or held whole by some ranks and in parts by others."""
    num_ranks = draw(st.integers(1, 6))
    some_ranks = st.sets(st.integers(0, num_ranks - 1), min_size=1)
    specs: list[TensorSpec] = []
    ranks: list[Held] = [[] for _ in range(num_ranks)]

    def cuts(extent: int, most: int) -> list[tuple[int, int]]:
        inner = draw(st.sets(st.integers(1, extent - 1), max_size=most)) if extent > 1 else set()
        return list(pairwise([0, *sorted(inner), extent]))

    def give(spec: TensorSpec, box: Box) -> None:
        for rank in draw(some_ranks):
            ranks[rank].append((spec.name, box))

    for i in range(draw(st.integers(1, 5))):
        shape, dtype = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(DTYPES))
        cut = draw(st.sampled_from(["row", "last"])) if shape else "row"
        spec = TensorSpec(f"t{i}", dtype, shape, draw(st.integers(-1, 2)), cut, frozen=draw(st.booleans()) and i == 0)
        specs.append(spec)
        kind = draw(st.sampled_from(["whole", "slabs", "grid", "mixed"])) if spec.num_words and shape else "whole"
        if kind in ("whole", "mixed") and spec.num_words:
            give(spec, whole(spec))
        if kind in ("slabs", "mixed"):
            axis = draw(st.integers(0, len(shape) - 1))
            for start, stop in cuts(shape[axis], 3):
                give(spec, slab(spec, axis, start, stop))
        if kind == "grid":
            for a, b in cuts(shape[0], 2):
                for c, d in cuts(shape[-1], 2) if len(shape) > 1 else [(0, 0)]:
                    box = slab(spec, 0, a, b)
                    if len(shape) > 1:
                        box = Box((*box.start[:-1], c), (*box.extent[:-1], d - c))
                    give(spec, box)
    return specs, ranks


@settings(deadline=None, max_examples=60)
@given(layouts(), st.randoms(use_true_random=False))
def test_every_word_has_one_owner_that_holds_it(case: tuple[list[TensorSpec], list[Held]], random: object) -> None:
    specs, ranks = case
    plan = make_plan(*holdings_of(specs, ranks))
    check(plan, ranks)
    grids = zip(plan.schema.tensors, plan.schema.grids, strict=True)
    largest_tile = max(int(g.tile_words(np.arange(g.num_tiles)).max(initial=0)) * t.word_nbytes for t, g in grids)
    assert plan.loads.max() <= plan.optimum * 1.002 + largest_tile
    # Deterministic, whatever the order in which ranks list what they hold.
    shuffled = [random.sample(held, len(held)) for held in ranks]  # type: ignore[attr-defined]
    again = make_plan(*holdings_of(specs[::-1], shuffled))
    assert again.digest == plan.digest
    assert again.loads.tolist() == plan.loads.tolist()


def test_a_tensor_parallel_cut_through_a_tile_gives_two_units_of_disjoint_parts() -> None:
    spec = TensorSpec("w", "BF16", (300, 1024), 0)  # 4 tiles of 75 rows; TP 3 cuts tiles 1 and 2
    ranks: list[Held] = [[("w", slab(spec, 0, 100 * r, 100 * r + 100))] for r in range(3)]
    plan = make_plan(*holdings_of([spec], ranks))
    check(plan, ranks)
    assert [plan.owned(r).tiles.tolist() for r in range(3)] == [[0, 1], [1, 2], [2, 3]]
    assert plan.owned(1).boxes() == [Box((100, 0), (50, 1024)), Box((150, 0), (50, 1024))]
    assert plan.owned(1).whole.tolist() == [False, False]
    assert len(plan.owners) == 6


def test_many_boxes_of_one_holder_in_a_tile_are_one_unit() -> None:
    # Fused QKV: query groups alternate between two tensor-parallel ranks, so a tile holds many boxes of each.
    spec = TensorSpec("q", "BF16", (256, 256), 0)
    ranks: list[Held] = [[("q", slab(spec, 0, g, g + 8)) for g in range(8 * r, 256, 16)] for r in range(2)]
    plan = make_plan(*holdings_of([spec], ranks))
    check(plan, ranks)
    assert len(plan.owners) == 2
    assert len(plan.owned(0)) == 1
    assert plan.owned(0).box_offsets.tolist() == [0, 16]
    assert plan.loads.tolist() == [65_536, 65_536]


def test_two_holder_sets_that_meet_in_a_tile_of_one_owner_are_one_unit_there() -> None:
    spec = TensorSpec("w", "BF16", (64, 64), 0)
    ranks: list[Held] = [
        [("w", slab(spec, 0, 0, 32)), ("w", slab(spec, 0, 32, 64))],
        [("w", slab(spec, 0, 32, 64)), ("x", Box((0,), (4096,)))],
    ]
    specs = [spec, TensorSpec("x", "BF16", (4096,), 0)]
    plan = make_plan(*holdings_of(specs, ranks))
    check(plan, ranks)
    assert len(plan.owners) == 3
    owned = plan.owned(0)
    assert len(owned) == 1
    assert owned.boxes() == [Box((0, 0), (32, 64)), Box((32, 0), (32, 64))]


def test_case_53_a_tensor_on_two_stages_is_owned_once() -> None:
    embedding = TensorSpec("embed", "BF16", (1000, 512), -1, aliases=("lm_head",))
    layers = [TensorSpec(f"layers.{i}.w", "BF16", (512, 512), i) for i in range(4)]
    ranks: list[Held] = []
    for stage in range(2):
        for tp in range(2):
            own = [(s.name, slab(s, 0, 256 * tp, 256 * tp + 256)) for s in layers[2 * stage : 2 * stage + 2]]
            ranks += [[("embed", slab(embedding, 0, 500 * tp, 500 * tp + 500)), *own]] * 2
    plan = make_plan(*holdings_of([embedding, *layers], ranks))
    check(plan, ranks)
    assert plan.loads.sum() == embedding.nbytes + 4 * layers[0].nbytes
    report = plan.report()
    assert [s.layers for s in report.stages] == [(0, 1), (2, 3)]
    assert [s.ranks.tolist() for s in report.stages] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert sum(s.nbytes for s in report.stages) == plan.loads.sum()
    assert report.over_optimum_ratio >= 1.0
    assert "what the holders allow" in str(report)


def test_a_whole_copy_beside_halves_is_split_and_shared() -> None:
    spec = TensorSpec("w", "F32", (512, 512), 0)
    ranks: list[Held] = [[("w", whole(spec))], [("w", slab(spec, 0, 0, 256))], [("w", slab(spec, 0, 256, 512))]]
    plan = make_plan(*holdings_of([spec], ranks))
    check(plan, ranks)
    assert sorted(plan.holdings.sets[int(s)].tolist() for s in plan.holdings.set_ids) == [[0, 1], [0, 2]]
    assert plan.loads.max() <= 512 * 512 * 4 / 2


def test_gaps_are_listed_with_their_ranges() -> None:
    specs = [TensorSpec("a", "BF16", (10, 4), 0), TensorSpec("b", "BF16", (6,), 0), TensorSpec("c", "BF16", (3,), 0)]
    ranks: list[Held] = [[("a", Box((0, 0), (4, 4))), ("b", Box((0,), (6,)))], [("a", Box((6, 0), (4, 4)))]]
    schema, holdings = holdings_of(specs, ranks)
    with pytest.raises(PlanError, match=r"some words of 1 tensors: a \[10, 4\]: 8 words, \[4:6, 0:4\]"):
        make_plan(schema, holdings)
    schema, holdings = merge("run", [([0], describe(specs, [("b", Box((0,), (6,)))]))])
    with pytest.raises(PlanError, match=r"c \[3\]: 3 words, \[0:3\]"):
        make_plan(schema, holdings)


def test_boxes_outside_their_tensor_are_refused_with_ranks() -> None:
    spec = TensorSpec("a", "BF16", (10, 4), 0)
    schema, holdings = holdings_of([spec], [[("a", whole(spec))]] * 2)
    holdings = replace(holdings, extents=holdings.extents + 1)
    with pytest.raises(PlanError, match=r"a \[10, 4\] has box \[0:11, 0:5\] on ranks 0-1"):
        make_plan(schema, holdings)


def test_case_62_bytes_beyond_4_gib_are_exact() -> None:
    spec = TensorSpec("huge", "F64", (3, 40_000, 50_000), 0)
    ranks: list[Held] = [[("huge", slab(spec, 1, 10_001 * r, min(10_001 * r + 10_001, 40_000)))] for r in range(4)]
    plan = make_plan(*holdings_of([spec], ranks))
    assert plan.loads.tolist() == [3 * 10_001 * 50_000 * 8] * 3 + [3 * 9_997 * 50_000 * 8]
    assert plan.owned(3).starts[:, 1].max() + plan.owned(3).extents[-1, 1] == 40_000


def test_frozen_and_empty_tensors_have_no_owner_and_need_no_holder() -> None:
    specs = [
        TensorSpec("f", "F32", (8,), 0, frozen=True),
        TensorSpec("e", "F32", (0, 4), 0),
        TensorSpec("s", "F32", (), 0),
    ]
    schema, holdings = merge("run", [([0, 1], describe(specs, [("s", Box((), ()))]))])
    plan = make_plan(schema, holdings)
    assert plan.loads.sum() == 4
    assert [schema.tensors[int(i)].name for r in range(2) for i in plan.owned(r).tensor_ids] == ["s"]
    with pytest.raises(ValueError, match="rank 2 of a plan for 2 ranks"):
        plan.owned(2)


def test_a_plan_of_nothing_is_empty() -> None:
    schema, holdings = merge("run", [([0], describe([], []))])
    plan = make_plan(schema, holdings)
    assert len(plan.owned(0)) == 0
    assert plan.optimum == 0
    assert plan.report().over_mean_ratio == 1.0


def test_expert_groups_smaller_than_data_groups_are_level() -> None:
    # DP 8, EP 4: experts on 2 ranks each, everything else on all 8. Experts alone would be level; the norm tops up.
    experts = [TensorSpec(f"experts.{e}", "BF16", (512, 1024), 0) for e in range(8)]
    dense = TensorSpec("dense", "BF16", (4096, 1024), 0)
    ranks: list[Held] = [
        [("dense", whole(dense)), *((experts[e].name, whole(experts[e])) for e in range(8) if e // 2 == r % 4)]
        for r in range(8)
    ]
    plan = make_plan(*holdings_of([dense, *experts], ranks))
    check(plan, ranks)
    assert plan.loads.max() == plan.loads.min() == (dense.nbytes + 8 * experts[0].nbytes) // 8 == plan.optimum


def test_a_mixture_of_experts_on_64_ranks_is_within_two_percent_of_the_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    # First and last stage, MTP layer, tied embedding, experts over fewer ranks than data parallelism has.
    monkeypatch.setattr(moe_shapes, "LAYERS", 8)
    monkeypatch.setattr(moe_shapes, "EXPERTS", 32)
    described = moe_shapes.classes(moe_shapes.Layout(stages=2, tensor=2, data=16, expert=8), scales=True)
    schema, holdings = merge("run", described)
    plan = make_plan(schema, holdings)
    report = plan.report()
    assert holdings.world_size == len(plan.loads) == 64
    assert plan.loads.sum() == schema.nbytes == sum(plan.owned(r).nbytes for r in range(64))
    assert report.over_optimum_ratio <= 1.02
    assert [len(s.ranks) for s in report.stages] == [32, 32]
    for rank in (0, 33, 63):
        owned = plan.owned(rank)
        held = {
            int(i) for i, s in zip(holdings.tensor_ids, holdings.set_ids, strict=True) if rank in holdings.sets[int(s)]
        }
        assert set(owned.tensor_ids.tolist()) <= held
        # Runs stay long: neighbours in the schema have one owner, so that frames span tensors.
        assert len(np.flatnonzero(np.diff(owned.tensor_ids.astype(np.int64)) > 40)) < len(owned) // 4
