"""Rank layouts of the planning benchmark: those it can lay out are no fault, the others say what would be."""

from __future__ import annotations

from itertools import product

import pytest

from launch.bench import moe_shapes
from launch.bench.moe_shapes import Layout, classes


def test_faults_are_those_of_layouts_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_shapes, "LAYERS", 2)
    monkeypatch.setattr(moe_shapes, "DENSE_LAYERS", 1)
    monkeypatch.setattr(moe_shapes, "EXPERTS", 4)
    kinds = set()
    for stages, tensor, data, expert in product((1, 2, 3), (1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 4, 8)):
        layout = Layout(stages, tensor, data, expert)
        kinds.add(bool(layout.faults()))
        if not layout.faults():
            ranks = sorted(rank for mine, _ in classes(layout, scales=False) for rank in mine)
            assert ranks == list(range(layout.world_size)), layout
    assert kinds == {True, False}


def test_the_measured_layout_is_no_fault_and_others_say_what_would_be() -> None:
    assert Layout().faults() == []
    assert Layout(tensor=3).faults() == [
        "tensor=3: every cut matrix must divide evenly: give a power of 2 up to 256",
        "expert=32: must divide the 192 ranks of a stage (data x tensor) and be a multiple of tensor=3",
    ]
    assert Layout(stages=79).faults() == ["stages=79: the model has 78 layers, a stage at least one of them"]
    assert Layout(expert=6).faults()[0] == "expert=6 does not divide the 256 experts: give a power of 2 up to 256"
