"""Regions: views of live memory for what a rank owns, never copies; and the replica check of a rank with itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megasync.digest import bytes_lanes
from megasync.errors import PlanError, RankFailedError, ReplicaDriftError
from megasync.schema import Schema
from megasync.trainer import replicas
from megasync.trainer.exporter import Exporter, Piece
from megasync.trainer.metadata import exchange
from megasync.trainer.plan import OwnershipPlan, make_plan
from megasync.trainer.plan_holdings import Holdings
from megasync.trainer.regions import LocalPieces, match_regions
from megasync.trainer.replicas import check_replicas, host_lanes
from megasync.types import Box, TensorSpec


class Fixed(Exporter):
    def __init__(self, specs: list[TensorSpec], pieces: list[Piece]) -> None:
        self._specs, self._pieces = specs, pieces

    def specs(self) -> list[TensorSpec]:
        return self._specs

    def pieces(self) -> list[Piece]:
        return self._pieces


def alone(specs: list[TensorSpec], pieces: list[Piece]) -> tuple[Schema, Holdings, OwnershipPlan]:
    schema, holdings = exchange("run", Fixed(specs, pieces), None)
    return schema, holdings, make_plan(schema, holdings)


def test_regions_are_views_of_the_live_weights() -> None:
    stored = torch.arange(512 * 600, dtype=torch.int16).reshape(512, 600)
    scalar = torch.tensor(3.0)
    specs = [TensorSpec("w", "BF16", (600, 512), 0), TensorSpec("s", "F32", (), 0), TensorSpec("b", "F32", (256,), 0)]
    bias = torch.nn.Parameter(torch.zeros(256))
    pieces = [
        Piece("w", Box((0, 0), (300, 512)), stored.T[:300]),  # stored transposed, held as two pieces
        Piece("w", Box((300, 0), (300, 512)), stored.T[300:], chunk=1),
        Piece("s", Box((), ()), scalar),
        Piece("b", Box((0,), (256,)), bias, volatile=True),
    ]
    schema, _, plan = alone(specs, pieces)
    regions = match_regions(schema, plan, 0, pieces)
    keys = [(r.tensor_id, r.tile, r.box.start) for r in regions]
    assert keys == sorted(keys)
    seen = torch.zeros(600, 512, dtype=torch.int16)
    stored += 1
    scalar += 1
    for r in regions:
        name = schema.tensors[r.tensor_id].name
        assert not r.data.requires_grad
        assert tuple(r.data.shape) == r.box.extent
        cell = schema.grids[r.tensor_id].box(r.tile)
        assert r.whole == (r.box == cell)
        assert r.inner == Box(tuple(a - b for a, b in zip(r.box.start, cell.start, strict=True)), r.box.extent)
        assert r.volatile == (name == "b")
        if name == "w":
            assert r.chunk == (r.box.start[0] >= 300)
            (y, x), (h, w) = r.box.start, r.box.extent
            seen[y : y + h, x : x + w] = r.data
        elif name == "s":
            assert r.data.tolist() == [4.0]
        else:
            assert r.data.data_ptr() == bias.data_ptr()
    assert torch.equal(seen, stored.T)
    # 600 rows make 4 tiles of 150; no piece boundary crosses one here, so every tile is whole.
    assert [r.tile for r in regions if schema.tensors[r.tensor_id].name == "w"] == [0, 1, 2, 3]


def test_a_tile_across_two_pieces_has_two_regions_that_follow_each_other() -> None:
    spec = TensorSpec("w", "U8", (400, 256), 0)
    data = torch.zeros(400, 256, dtype=torch.uint8)
    pieces = [Piece("w", Box((0, 0), (100, 256)), data[:100]), Piece("w", Box((100, 0), (300, 256)), data[100:])]
    schema, _, plan = alone([spec], pieces)
    regions = match_regions(schema, plan, 0, pieces)
    assert [(r.tile, r.inner, r.whole) for r in regions] == [
        (0, Box((0, 0), (100, 256)), False),
        (0, Box((100, 0), (300, 256)), False),
    ]


def test_owned_boxes_go_to_the_exporter_and_come_back_as_pieces() -> None:
    spec = TensorSpec("w", "BF16", (512, 512), 0)
    scalar = TensorSpec("s", "F32", (), 0)
    exporter = Fixed(
        [spec, scalar],
        [
            Piece("w", Box((0, 0), (512, 512)), torch.zeros(512, 512).bfloat16()),
            Piece("s", Box((), ()), torch.ones(())),
        ],
    )
    schema, holdings = exchange("run", exporter, None)
    plan = make_plan(schema, holdings)
    pieces = exporter.own(plan.owned(0).named_boxes(), schema.tensors)
    regions = match_regions(schema, plan, 0, pieces)
    assert len(regions) == len(pieces) == 5
    assert sum(r.data.numel() for r in regions) == 512 * 512 + 1


def test_memory_that_is_missing_of_another_size_or_on_meta_is_listed() -> None:
    specs = [TensorSpec(n, "F32", (4,), 0) for n in "abcd"]
    box = Box((0,), (4,))
    pieces = [Piece(n, box, torch.zeros(4)) for n in "abcd"]
    schema, _, plan = alone(specs, pieces)
    wrong = [
        Piece("b", box, torch.zeros(4, dtype=torch.int16)),
        Piece("c", box, torch.zeros(4, device="meta")),
        Piece("d", box, torch.zeros(5)),
    ]
    with pytest.raises(PlanError) as caught:
        match_regions(schema, plan, 0, wrong)
    text = str(caught.value)
    assert text.startswith("4 owned boxes have no usable memory: a [0:4] lies in no piece of rank 0")
    assert "b: the view has torch.int16, F32 has words of 4 bytes" in text
    assert "c [0:4] has no bytes: take the pieces from Exporter.own" in text
    assert "d [0:4]: the view has shape [5]" in text


def test_an_exporter_that_fails_alone_raises_what_several_ranks_would() -> None:
    class Broken(Fixed):
        def pieces(self) -> list[Piece]:
            raise PlanError("no table maps x")

    with pytest.raises(RankFailedError, match="exporting failed on 1 rank") as caught:
        exchange("run", Broken([], []), None)
    assert isinstance(caught.value.__cause__, PlanError)


@pytest.mark.parametrize("slab", [64, 1 << 20])
def test_digest_sums_of_strided_views_in_slabs(slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_SLAB_NBYTES", slab)
    words = torch.from_numpy(np.random.default_rng(0).integers(0, 1 << 16, (40, 36), dtype=np.uint16))
    total = bytes_lanes(words.numpy().reshape(-1).view(np.uint8))
    stored = words.T.contiguous()
    parts = [Box((0, 0), (40, 20)), Box((0, 20), (1, 16)), Box((1, 20), (39, 16))]
    found = [host_lanes((40, 36), b, stored.T[b.start[0] :, b.start[1] :][: b.extent[0], : b.extent[1]]) for b in parts]
    assert found[0] + found[1] + found[2] == total


def test_case_53_two_copies_on_one_rank_that_differ_are_drift() -> None:
    spec = TensorSpec("embed", "BF16", (16, 8), -1, aliases=("lm_head",))
    box = Box((0, 0), (16, 8))
    first, second = torch.ones(16, 8).bfloat16(), torch.ones(16, 8).bfloat16()
    pieces = [Piece("embed", box, first), Piece("lm_head", box, second)]
    schema, holdings, _ = alone([spec], pieces[:1])
    report = check_replicas(schema, holdings, pieces, None)
    assert (report.num_boxes, report.nbytes, report.num_unread) == (1, 256, 0)
    second[3, 3] = -1.0
    with pytest.raises(ReplicaDriftError, match=r"1 tensors differ.*embed \[0:16, 0:8\]: ranks 0 have"):
        check_replicas(schema, holdings, pieces, None)
    assert len(list(LocalPieces(schema, pieces).find(0, Box((1, 1), (2, 2))))) == 2


def test_boxes_without_bytes_are_counted_and_not_compared() -> None:
    spec = TensorSpec("w", "U8", (4,), 0)
    pieces = [Piece("w", Box((0,), (4,)), torch.zeros(4, dtype=torch.uint8, device="meta"))]
    schema, holdings, _ = alone([spec], pieces)
    report = check_replicas(schema, holdings, pieces, None)
    assert (report.num_boxes, report.num_unread) == (0, 1)
