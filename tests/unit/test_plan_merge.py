"""Descriptions: equal whatever the order, merged without loss, refused by name where ranks disagree."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.errors import PlanError
from megasync.schema import make_schema
from megasync.trainer.exporter import Piece
from megasync.trainer.metadata import describe_pieces
from megasync.trainer.plan_holdings import Holdings, brief_ranks
from megasync.trainer.plan_merge import decode_merged, describe, encode_merged, merge, refusal
from megasync.types import Box, TensorSpec

SPECS = [
    TensorSpec("b", "U8", (4, 8), 1, "last", (1, 8), False, ("b.alias",), "nvfp4", "g"),
    TensorSpec("a", "BF16", (6,), 0),
    TensorSpec("s", "F32", (), 1),
    TensorSpec("d", "F32", (2, 3, 4), -1),
]
Held = list[tuple[str, Box]]


def as_dict(names: list[str], held: Holdings, axes: list[int]) -> dict[tuple[str, Box], list[int]]:
    out: dict[tuple[str, Box], list[int]] = {}
    for i in range(len(held)):
        tensor_id = int(held.tensor_ids[i])
        box = held.box(i, axes[tensor_id]) if axes[tensor_id] else Box((), ())
        assert (names[tensor_id], box) not in out
        out[names[tensor_id], box] = held.sets[int(held.set_ids[i])].tolist()
    return out


@st.composite
def holders(draw: st.DrawFn) -> list[Held]:
    """Up to six ranks with any boxes, overlapping, empty and repeated ones included."""
    ranks: list[Held] = []
    for _ in range(draw(st.integers(1, 6))):
        held: Held = []
        for spec in draw(st.lists(st.sampled_from(SPECS), max_size=5)):
            start = tuple(draw(st.integers(0, n)) for n in spec.shape)
            extent = tuple(draw(st.integers(0, n - s)) for n, s in zip(spec.shape, start, strict=True))
            held.append((spec.name, Box(start, extent)))
        ranks.append(held)
    return ranks


@settings(deadline=None)
@given(holders())
def test_merging_keeps_every_box_with_exactly_its_ranks(ranks: list[Held]) -> None:
    classes: dict[bytes, list[int]] = {}
    for rank, held in enumerate(ranks):
        described = describe(SPECS, held)
        assert describe(SPECS[::-1], held[::-1] + held[:1]) == described
        classes.setdefault(described, []).append(rank)
    schema, merged = merge("run", [(r, d) for d, r in classes.items()])
    assert schema == make_schema("run", SPECS)
    assert merged.world_size == len(ranks)
    names, axes = [t.name for t in schema.tensors], [len(t.shape) for t in schema.tensors]
    expected: dict[tuple[str, Box], list[int]] = {}
    for rank, held in enumerate(ranks):
        for key in set(held):
            expected.setdefault(key, []).append(rank)
    assert as_dict(names, merged, axes) == expected
    again, decoded = decode_merged(encode_merged(schema, merged))
    assert again == schema
    assert again.digest == schema.digest
    assert as_dict(names, decoded, axes) == expected
    assert decoded.world_size == merged.world_size
    for column in ("tensor_ids", "starts", "extents", "set_ids"):
        assert np.array_equal(getattr(decoded, column), getattr(merged, column))


def test_disagreement_about_a_tensor_names_it_the_ranks_and_what_differs() -> None:
    other = replace(SPECS[1], dtype="F16", layer=3)
    with pytest.raises(PlanError) as caught:
        merge("run", [([0, 1, 2, 5], describe(SPECS, [])), ([3, 4], describe([other], []))])
    text = str(caught.value)
    assert "ranks disagree about 1 tensors: a: ranks 0-2, 5 have dtype 'BF16', layer 0" in text
    assert "ranks 3-4 have dtype 'F16', layer 3" in text


def test_a_name_that_is_another_tensors_alias_is_refused() -> None:
    with pytest.raises(PlanError, match=r"b\.alias appears twice"):
        merge("run", [([0], describe(SPECS, [])), ([1], describe([TensorSpec("b.alias", "F32", (1,))], []))])


def test_faults_of_one_rank_are_listed_together() -> None:
    held: Held = [("x", Box((0,), (1,))), ("a", Box((4,), (3,))), ("a", Box((0, 0), (1, 1))), ("s", Box((0,), (1,)))]
    with pytest.raises(PlanError) as caught:
        describe([*SPECS, TensorSpec("a", "F32", (6,)), TensorSpec("odd", "F5", (1,))], held)
    text = str(caught.value)
    assert text.startswith("6 faults in what this rank exports: a has two specs")
    for part in (
        "odd has dtype F5",
        "x has a piece but no spec",
        "a [6] has a piece at [4] of extent [3]",
        "a [6] has a piece at [0, 0]",
        "s [] has a piece at [0]",
    ):
        assert part in text


def test_views_are_checked_against_their_boxes() -> None:
    box = Box((0,), (6,))
    good = Piece("a", box, torch.zeros(6, dtype=torch.int16))
    assert describe_pieces(SPECS, [good]) == describe(SPECS, [("a", box)])
    with pytest.raises(PlanError, match=r"a: the view has shape \[5\], its box \[6\]"):
        describe_pieces(SPECS, [Piece("a", box, torch.zeros(5, dtype=torch.int16))])
    with pytest.raises(PlanError, match=r"a: the view has torch.float32, the spec words of 2 bytes"):
        describe_pieces(SPECS, [Piece("a", box, torch.zeros(6))])


@pytest.mark.parametrize("cut", [0, 1, 7, -1])
def test_bytes_that_are_no_description_are_refused(cut: int) -> None:
    described = describe(SPECS, [("a", Box((0,), (6,)))])
    with pytest.raises(PlanError, match="the description of rank 7 cannot be read"):
        merge("run", [([7], described[:cut])])
    merged = encode_merged(*merge("run", [([0], described)]))
    with pytest.raises(PlanError, match="the merged holdings cannot be read"):
        decode_merged(merged[:cut])


def test_a_refusal_travels_as_its_text() -> None:
    with pytest.raises(PlanError, match=r"^ranks disagree$"):
        decode_merged(refusal(PlanError("ranks disagree")))


def test_ranks_are_written_as_ranges() -> None:
    assert brief_ranks([5, 0, 1, 2, 9, 8]) == "0-2, 5, 8-9"
    assert brief_ranks([]) == ""
    assert brief_ranks(range(0, 100, 2), 3) == "0, 2, 4 and 47 more ranges"
