"""Named engine layouts against plain-torch restatements of the engines: transform(base) ^ remap(mask) == transform(new)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megasync.errors import PlanError
from megasync.layout import arrange
from megasync.layout import experts as E
from megasync.layout import named as N
from megasync.layout.conformance import check_layout, check_layouts
from tests.unit.layout_oracles import ALL, Case, swizzle_blockscale


@pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)
def test_masks_turn_one_load_into_the_other(case: Case) -> None:
    check_layouts(case.layouts, case.load, case.specs)


def digits(case_name: str) -> int:
    case = next(c for c in ALL if c.name == case_name)
    return max(len(r.digits) for layout in case.layouts.values() for r in layout.records)


@pytest.mark.parametrize(
    ("case_name", "most"),
    [
        ("swizzle-160x450-tp-slice", 5),
        ("moe-cutedsl-groups-of-64-scales", 5),
        ("nvfp4-dense-trtllm", 6),
        ("moe-nvfp4-trtllm-weights", 4),
        ("moe-nvfp4-trtllm-scales", 6),
        ("moe-bf16-trtllm-block-major", 5),
        ("moe-deepseek-fp8-trtllm", 5),
        ("moe-cpu-tiles", 3),
        ("marlin", 8),
        ("fp8-transposed", 2),
    ],
)
def test_digit_counts(case_name: str, most: int) -> None:
    assert digits(case_name) == most


def test_replicated_heads_have_one_primary_over_the_group() -> None:
    def primaries(part: N.QkvPart) -> list[bool]:
        return [
            N.fused_qkv(
                part,
                q_shape=(64, 16),
                kv_shape=(16, 16),
                num_kv_heads=2,
                word_nbytes=2,
                storage="qkv",
                tp_rank=rank,
                tp_size=8,
            )
            .records[0]
            .primary
            for rank in range(8)
        ]

    assert primaries("q") == [True] * 8
    assert primaries("k") == primaries("v") == [True, False, False, False, True, False, False, False]


def test_each_vocabulary_row_is_on_one_rank_and_padding_on_none() -> None:
    layouts = [N.vocab_parallel((70, 12), word_nbytes=2, storage="e", tp_rank=r, tp_size=4) for r in range(4)]
    assert [(x.start[0], x.stop[0]) for x in layouts] == [(0, 32), (32, 64), (64, 70), (70, 70)]
    assert [len(x.records) for x in layouts] == [1, 1, 1, 0]


def test_case_34_gate_and_up_scales_that_are_one_number_each_stay_apart() -> None:
    # The second-level scales of gate and up, one float each, stacked [experts, 2]: two tensors, two places.
    specs = {"gate": ((), torch.float32), "up": ((), torch.float32)}
    layouts = {
        p: E.stacked(arrange((), word_nbytes=4).stack(i, 2).merge(0), E.Place(1, 3), "g13") for i, p in enumerate(specs)
    }

    def load(w: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        out = torch.zeros(3, 2)
        out[1, 0], out[1, 1] = w["gate"], w["up"]
        return {"g13": out}

    check_layouts(layouts, load, specs, finite=True)


def test_block_scales_of_a_cut_that_is_no_multiple_of_128_rows() -> None:
    # TP 3 of 480 rows: 160 a rank, swizzled on its own.
    for rank in range(3):
        rows = N.cut_evenly((480, 9), 0, word_nbytes=1, tp_rank=rank, tp_size=3)
        layout = N.swizzled_scales(rows, "s")
        check_layout(layout, lambda t, r=rank: {"s": swizzle_blockscale(t[160 * r : 160 * (r + 1)])}, torch.uint8)


@pytest.mark.parametrize(
    "build",
    [
        lambda: N.column_parallel((10, 4), word_nbytes=2, storage="s", tp_rank=0, tp_size=4),
        lambda: N.column_parallel((12, 4), word_nbytes=2, storage="s", tp_rank=4, tp_size=4),
        lambda: N.vocab_parallel((70, 4), word_nbytes=2, storage="s", tp_rank=0, tp_size=3),
        lambda: N.fused_qkv(
            "k",
            q_shape=(64, 4),
            kv_shape=(24, 4),
            num_kv_heads=3,
            word_nbytes=2,
            storage="s",
            tp_rank=0,
            tp_size=4,
        ),
        lambda: N.marlin_nibbles((96, 24), storage="s"),
        lambda: N.marlin_nibbles((128, 20), storage="s"),
        lambda: E.w2_stack((8, 8), E.Place(3, 3), "s", word_nbytes=2),
        lambda: E.stacked(E.w2_rows((24, 8), E.Place(0, 1), word_nbytes=2), E.Place(0, 1), "s", E.cpu_tiles),
    ],
)
def test_shapes_that_do_not_divide_are_refused(build: Callable[[], object]) -> None:
    with pytest.raises(PlanError):
        build()


def _qkv(part: str = "q", **more: object) -> object:
    known: dict[str, object] = {
        "q_shape": (64, 24),
        "kv_shape": (16, 24),
        "num_kv_heads": 2,
        "word_nbytes": 2,
        "storage": "s",
        "tp_rank": 0,
        "tp_size": 2,
    }
    return N.fused_qkv(part, **known | more)  # type: ignore[arg-type]


def _w13(part: str = "gate", **more: object) -> object:
    return E.w13_stack(part, (64, 4), E.Place(0, 4), "s", word_nbytes=1, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: _qkv("x"), "part 'x' is none of 'q', 'k', 'v'"),
        (
            lambda: N.fused_gate_up("w3", (8, 4), word_nbytes=2, storage="s", tp_rank=0, tp_size=2),  # type: ignore[arg-type]
            "part 'w3' is none of 'gate', 'up'",
        ),
        (lambda: _w13("w1"), "part 'w1' is none of 'gate', 'up'"),
        (lambda: _w13(order="foo"), "order 'foo' is none of 'gate_first', 'up_first'"),
        (
            lambda: E.w13_interleaved("Gate", (64, 4), E.Place(0, 4), "s", word_nbytes=1),  # type: ignore[arg-type]
            "part 'Gate' is none of",
        ),
    ],
)
def test_misspelt_names_are_not_taken_for_another(build: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build()


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: _qkv(num_kv_heads=0), "at least one key-value head"),
        (lambda: _qkv(kv_shape=(16, 23)), r"q rows of \(24,\) and kv rows of \(23,\)"),
        (lambda: _qkv(tp_size=0), "rank 0 is not in a tensor-parallel group of 0"),
        (lambda: _qkv("k", tp_rank=2), "rank 2 is not in a tensor-parallel group of 2"),
        (lambda: N.vocab_parallel((8, 4), word_nbytes=2, storage="s", tp_rank=2, tp_size=2), "rank 2 is not in"),
        (lambda: N.vocab_parallel((8, 4), word_nbytes=2, storage="s", tp_rank=0, tp_size=0), "rank 0 is not in"),
        (
            lambda: N.vocab_parallel((8, 4), word_nbytes=2, storage="s", tp_rank=0, tp_size=2, multiple=0),
            "to a multiple of 0",
        ),
        (lambda: N.cut_evenly((8, 4), 2, word_nbytes=2, tp_rank=0, tp_size=2), "axis 2 is out of range"),
        (lambda: E.block_major(24, 64), "blocks of 16 or 32, got 24"),  # type: ignore[arg-type]
        (lambda: E.block_major(16, 0), "at least one column"),
    ],
)
def test_impossible_wishes_are_refused_where_they_are_made(build: Callable[[], object], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        build()


def test_copies_of_another_rank_have_no_primary() -> None:
    layout = N.as_copy(N.column_parallel((8, 4), word_nbytes=2, storage="s", tp_rank=0, tp_size=2))
    assert [r.primary for r in layout.records] == [False]


def test_case_48_a_four_dimensional_expert_stack_is_mapped() -> None:
    case = next(c for c in ALL if c.name == "moe-bf16-trtllm-block-major")
    live = case.load({n: torch.zeros(s, dtype=d) for n, (s, d) in case.specs.items()})
    assert tuple(live["w13"].shape) == (3, 2, 256, 64)
    check_layouts(case.layouts, case.load, case.specs, seed=1)
