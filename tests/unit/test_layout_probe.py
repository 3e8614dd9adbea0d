"""The probe: finds every named layout from the plain-torch transform alone, and names what is no move."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.errors import FormatError, PlanError
from megasync.layout import Layout, ProbedPlan, probe
from megasync.layout.conformance import check_plan
from megasync.layout.probe_fit import MAX_COPIES, digits_of, runs_of
from megasync.layout.probe_patterns import ALPHABETS, random_tensor
from megasync.layout.views import box_offsets
from tests.unit.layout_oracles import ALL, BF16, F32, FP8, I32, U8, Case, cpu_pack, raw, swizzle_blockscale

Tensors = Mapping[str, torch.Tensor]


def places(layout: Layout) -> set[tuple[str, int, int]]:
    out = set()
    for r in layout.records:
        scale = layout.units_per_word(r)
        for coords, offsets in box_offsets(r):
            numbers = np.ravel_multi_index(coords, (*layout.shape[:-1], layout.shape[-1] * scale))
            out |= {(r.storage, n, o) for n, o in zip(numbers.tolist(), offsets.tolist(), strict=True)}
    return out


@pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)
def test_every_named_layout_is_found(case: Case) -> None:
    plan = probe(case.load, case.specs, num_draws=1)
    held = {name for name, layout in case.layouts.items() if layout.records}
    assert set(plan.unmapped) == set(plan.absent) == set(case.specs) - held
    assert not plan.derived
    for name in held:
        found, named = plan.layouts[name], case.layouts[name]
        assert (found.start, found.stop, found.partial) == (named.start, named.stop, False)
        assert places(found) == places(named)
        # One digit more may save a record of its own for a rim.
        spent = [sum(len(r.digits) for r in x.records) for x in (found, named)]
        assert spent[0] <= spent[1]
        assert len(found.records) <= len(named.records)
    plan.validate()


@pytest.mark.parametrize(
    "name", ["marlin", "norm-and-tied", "moe-cutedsl-groups-of-64-scales", "two-images", "vocab-r3"]
)
def test_found_plans_conform(name: str) -> None:
    case = next(c for c in ALL if c.name == name)
    check_plan(probe(case.load, case.specs, num_draws=1), case.load, case.specs)


def one(
    load: Callable[[torch.Tensor], dict[str, torch.Tensor]],
    shape: tuple[int, ...] = (24, 20),
    dtype: torch.dtype = BF16,
) -> ProbedPlan:
    return probe(lambda w: load(w["w"]), {"w": (shape, dtype)}, num_draws=1)


@pytest.mark.parametrize("name", sorted(ALPHABETS))
def test_every_dtype_is_probed(name: str) -> None:
    dtype = getattr(torch, name)
    shape = (9, 10) if name == "bool" else (40, 50)
    plan = one(lambda w: {"live": torch.cat([torch.zeros(8, shape[1], dtype=U8), bytes_of(w)])}, shape, dtype)
    assert plan.mapped == {"w"}
    assert [r.base for r in plan.layouts["w"].records] == [8 * shape[1] // dtype.itemsize]


def bytes_of(w: torch.Tensor) -> torch.Tensor:
    """The rows of bytes of a matrix, cut to its own number of columns."""
    return w.contiguous().view(-1).view(U8).reshape(-1, w.shape[1])


def test_word_zero_is_told_from_padding() -> None:
    def load(w: torch.Tensor) -> dict[str, torch.Tensor]:
        out = torch.zeros(4, 8, dtype=w.dtype)
        out[1, 2] = w[0]
        return {"live": out}

    for dtype in (BF16, U8, FP8):
        plan = one(lambda w: {"live": load(w.view(U8) if w.dtype == FP8 else w)["live"]}, (1,), dtype)
        assert plan.layouts["w"].records[0].base == 10


def test_several_sources_dtype_views_and_strides_in_one_storage() -> None:
    # One buffer: bytes of a, b transposed by a view, c seen as int32; and a tied second name.
    def load(w: Tensors) -> dict[str, torch.Tensor]:
        buffer = torch.zeros(4096, dtype=U8)
        buffer[64:1088] = w["a"].reshape(-1).view(U8)
        buffer[2048:2688] = w["b"].t().contiguous().view(U8).reshape(-1)
        buffer[3072:3172] = w["c"].reshape(-1)
        return {
            "a": buffer[64:1088].view(BF16).view(16, 32),
            "b": buffer[2048:2688].view(BF16).view(20, 16).t(),
            "c": buffer[3072:3172].view(I32).view(5, 5),
            "a_again": buffer[64:1088].view(BF16),
        }

    specs = {"a": ((16, 32), BF16), "b": ((16, 20), BF16), "c": ((10, 10), U8)}
    plan = probe(load, specs)
    assert plan.unmapped == {}
    assert {r.storage for layout in plan.layouts.values() for r in layout.records} == {"a"}
    assert [layout.records[0].base for layout in plan.layouts.values()] == [32, 1024, 3072]
    check_plan(plan, load, specs)


def test_bytes_that_no_live_tensor_shows_are_not_destinations() -> None:
    # The storage holds the whole checkpoint tensor; the live view shows its second half.
    plan = one(lambda w: {"live": w.clone()[12:]})
    assert (plan.layouts["w"].start, plan.layouts["w"].stop) == ((12, 0), (24, 20))
    assert plan.layouts["w"].records[0].base == 240


def test_case_52_non_contiguous_live_tensors() -> None:
    def load(w: torch.Tensor) -> dict[str, torch.Tensor]:
        out = torch.zeros(24, 41, dtype=BF16)[:, 1::2]
        out.copy_(w)
        return {"live": out}

    plan = one(load)
    assert plan.mapped == {"w"}
    specs = {"w": ((24, 20), BF16)}
    check_plan(plan, lambda w: load(w["w"]), specs)
    # A mask that is itself a non-contiguous view.
    live = load(torch.zeros(24, 20, dtype=BF16))
    mask = torch.randint(-(1 << 15), 1 << 15, (20, 24), dtype=torch.int16).t()
    plan.xor_(live, {"w": mask})
    assert torch.equal(live["live"].contiguous().view(torch.int16), mask)


def test_copies_partial_copies_and_one_primary() -> None:
    def load(w: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"head": w[:8].clone(), "whole": w.clone(), "rows_twice": w.repeat_interleave(2, dim=0)}

    plan = one(load)
    layout = plan.layouts["w"]
    assert plan.mapped == {"w"}
    assert sum(r.num_units for r in layout.records if r.primary) == 480
    assert {r.storage for r in layout.records if r.primary} == {"whole"}
    assert sum(r.num_units for r in layout.records) == 480 * 3 + 160
    check_plan(plan, lambda w: load(w["w"]), {"w": ((24, 20), BF16)})


def test_primaries_that_overlap_in_part_are_cut() -> None:
    plan = one(lambda w: {"a": w[:16].clone(), "b": w[8:].clone()})
    layout = plan.layouts["w"]
    assert [(r.storage, r.start[0], r.stop[0], r.primary) for r in layout.records] == [
        ("a", 0, 16, True),
        ("b", 16, 24, True),
        ("b", 8, 16, False),
    ]
    check_plan(plan, lambda w: {"a": w["w"][:16].clone(), "b": w["w"][8:].clone()}, {"w": ((24, 20), BF16)})


def test_case_47_fused_checkpoint_tensors_are_cut_in_runs() -> None:
    # [2 I, H] gate over up in the checkpoint; TP 2 holds two runs of rows.
    def load(w: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"w13": torch.cat([w[4:8], w[12:16]])}

    plan = one(load, (16, 6))
    layout = plan.layouts["w"]
    assert layout.partial
    assert [(r.start[0], r.stop[0]) for r in layout.records] == [(4, 8), (12, 16)]
    live = load(torch.zeros(16, 6, dtype=BF16))
    mask = torch.arange(1, 97, dtype=torch.int16).reshape(16, 6)
    plan.xor_(live, {"w": mask})
    assert torch.equal(live["w13"].view(torch.int16), torch.cat([mask[4:8], mask[12:16]]))
    back = plan.gather(live)["w"].view(torch.int16)
    assert torch.equal(back[[0, 1, 2, 3, 8, 9, 10, 11]], mask[[4, 5, 6, 7, 12, 13, 14, 15]])
    assert not back[4:8].any()


def test_query_groups_are_cut_in_runs() -> None:
    # [groups, q q k v] in the checkpoint, [q .. | k .. | v ..] in the engine.
    def load(w: torch.Tensor) -> dict[str, torch.Tensor]:
        g = w.reshape(4, 4, 8, 6)
        return {"qkv": torch.cat([g[:, :2].reshape(-1, 6), g[:, 2].reshape(-1, 6), g[:, 3].reshape(-1, 6)])}

    plan = one(load, (128, 6))
    assert plan.mapped == {"w"}
    assert len(plan.layouts["w"].records) <= 12
    check_plan(plan, lambda w: load(w["w"]), {"w": ((128, 6), BF16)})


def test_axes_that_digits_cross_are_merged() -> None:
    plan = one(
        lambda w: {"live": torch.nn.functional.pad(w.reshape(-1), (0, 10)).reshape(10, 16).t().contiguous()}, (3, 50)
    )
    assert plan.layouts["w"].records[0].merge == ((0, 1),)


def test_a_widening_cast_is_found_to_be_a_move() -> None:
    # bf16 -> fp32 keeps the bits in the upper half and zeros the lower: masks commute, NaN patterns included.
    plan = one(lambda w: {"live": w.float()})
    assert plan.mapped == {"w"}
    assert [d.dst_stride for d in plan.layouts["w"].records[0].digits] == [40, 2]
    check_plan(plan, lambda w: {"live": w["w"].float()}, {"w": ((24, 20), BF16)})


@pytest.mark.parametrize(
    ("shape", "dtype", "load", "why"),
    [
        ((24, 20), F32, lambda w: {"live": w.to(BF16)}, "value transform"),
        ((24, 20), BF16, lambda w: {"live": w * 2}, "value transform"),
        ((24, 20), BF16, lambda w: {"live": w.t() @ w}, "value transform"),
        ((24, 20), BF16, lambda w: {"live": w.amax()}, "value transform"),
        ((24, 20), FP8, lambda w: {"live": w.float() * 0.5}, "value transform"),
        ((24, 20), BF16, lambda w: {"live": w.float().to(BF16)}, "rewrites NaN or infinity"),
        ((24, 20), BF16, lambda w: {"live": w.reshape(-1)[torch.randperm(480, generator=_seeded())]}, "no mixed-radix"),
        ((16, 16), U8, lambda w: {"live": _xor_swizzle(w)}, "several axes at once"),
        ((3, 4), BF16, lambda w: {"live": w.expand(40, 3, 4).contiguous()}, "broadcast"),
        (
            (24, 20),
            BF16,
            lambda w: {"live": torch.where(w.float() > 4, w, torch.zeros_like(w))},
            "value transform",
        ),
        ((32, 16), U8, lambda w: {"live": (w & 15) * 3}, "value transform"),
        ((20, 20), BF16, lambda w: {"live": w.triu()}, "form no box"),
    ],
)
def test_what_is_no_move_is_named_with_its_reason(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    load: Callable[[torch.Tensor], dict[str, torch.Tensor]],
    why: str,
) -> None:
    plan = one(load, shape, dtype)
    assert plan.mapped == frozenset()
    assert re.search(why, plan.unmapped["w"])
    assert plan.absent == ()
    assert "live" in plan.unmapped["w"]
    assert plan.derived == {"live": "computed from ['w']"}
    with pytest.raises(PlanError, match="nothing was touched"):
        plan.xor_(load(torch.zeros(shape, dtype=dtype)), {"w": torch.zeros(shape, dtype=dtype)})


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def _xor_swizzle(w: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(16)[:, None]
    return w[rows, torch.arange(16)[None, :] ^ (rows % 8)]


def test_sources_of_computed_tensors_are_named() -> None:
    def load(w: Tensors) -> dict[str, torch.Tensor]:
        scales = torch.stack([w["q_scale"], w["k_scale"], w["v_scale"]])
        return {
            "qkv": torch.cat([w["q"], w["k"]]),
            "scale": scales.max(),
            "low": scales.min(),
            "absorbed": w["k"].float() @ w["k"].float().t(),
            "cos": torch.ones(8),
        }

    specs = (
        dict.fromkeys(("q", "k"), ((16, 8), BF16)) | {f"{n}_scale": ((), F32) for n in "qkv"} | {"rest": ((4,), F32)}
    )
    plan = probe(load, specs)
    assert plan.mapped == {"q"}
    assert set(plan.layouts) == {"q", "k"}
    assert plan.derived == {
        "scale": "computed from ['k_scale', 'q_scale', 'v_scale']",
        "low": "computed from ['k_scale', 'q_scale', 'v_scale']",
        "absorbed": "computed from ['k']",
    }
    assert plan.unmapped["k"].startswith("moved, but also the source of a value transform")
    assert plan.absent == ("rest",)
    check_plan(plan, load, specs)


@pytest.mark.parametrize("seed", range(6))
def test_extremes_of_few_numbers_are_never_taken_for_moves(seed: int) -> None:
    # A maximum of two numbers is one of them, so in half of all random draws it looks like a move.
    def load(w: Tensors) -> dict[str, torch.Tensor]:
        pair = torch.stack([w["gate"], w["up"]])
        both = raw(w["fp8"]).amax().view(FP8), raw(w["fp8"]).amin().view(FP8)
        return {"max": pair.max(), "min": pair.min(), "scale": w["pair"].max(), "high": both[0], "low": both[1]}

    specs = {"gate": ((), F32), "up": ((), F32), "pair": ((2,), BF16), "fp8": ((2,), FP8), "more": ((500,), FP8)}
    plan = probe(load, specs, num_draws=1, seed=seed)
    assert plan.mapped == frozenset()
    assert plan.absent == ("more",)
    assert set(plan.derived) == {"max", "min", "scale", "high", "low"}


def test_case_34_a_fused_scale_that_takes_one_of_two_names_the_other() -> None:
    specs = {"gate_scale": ((), F32), "up_scale": ((), F32)}
    plan = probe(lambda w: {"w13_scale": w["gate_scale"].clone()}, specs)
    assert plan.mapped == {"gate_scale"}
    assert plan.absent == ("up_scale",)
    assert "dropped" in plan.unmapped["up_scale"]


def test_loaders_may_change_what_they_are_given() -> None:
    def load(w: Tensors) -> dict[str, torch.Tensor]:
        live = w["w"].clone()
        w["w"].zero_()
        return {"live": live}

    assert probe(load, {"w": ((24, 20), BF16)}).mapped == {"w"}


def test_empty_live_parameters_are_reported() -> None:
    # The engine gives the weight to an opaque handle and keeps an empty parameter.
    plan = one(lambda w: {"weight": torch.empty(0), "bias": torch.zeros(4)})
    assert plan.empty == ("weight",)
    assert plan.mapped == frozenset()
    assert "without elements: ['weight']" in plan.unmapped["w"]


def test_case_75_constant_buffers_are_left_alone() -> None:
    def load(w: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"live": w.clone(), "inv_freq": torch.arange(16.0), "steps": torch.tensor(3)}

    plan = one(load)
    assert plan.unmapped == {}
    assert plan.derived == {}
    live = load(torch.zeros(24, 20, dtype=BF16))
    plan.xor_(live, {"w": torch.full((24, 20), 7, dtype=torch.int16)})
    assert torch.equal(live["inv_freq"], torch.arange(16.0))
    assert live["steps"] == 3


def test_padding_that_is_not_initialised_is_reported() -> None:
    noise = itertools.count(1)

    def load(w: Tensors) -> dict[str, torch.Tensor]:
        out = torch.full((32, 20), next(noise), dtype=torch.int16)
        out[:24] = w["w"].view(torch.int16)
        return {"live": out}

    plan = probe(load, {"w": ((24, 20), BF16)}, num_draws=1)
    assert plan.unstable == ("live",)
    assert plan.mapped == {"w"}
    assert plan.derived == {}


def test_the_same_live_tensors_filled_in_place_at_every_load() -> None:
    live = {"live": torch.zeros(20, 24, dtype=BF16)}

    def load(w: Tensors) -> dict[str, torch.Tensor]:
        live["live"].copy_(w["w"].t())
        return live

    plan = probe(load, {"w": ((24, 20), BF16)})
    assert plan.mapped == {"w"}
    address = live["live"].data_ptr()
    before = live["live"].clone()
    mask = torch.randint(1, 100, (24, 20), dtype=torch.int16)
    plan.xor_(live, {"w": mask})
    assert live["live"].data_ptr() == address
    assert torch.equal(live["live"].view(torch.int16) ^ before.view(torch.int16), mask.t())


def test_loaders_that_misbehave_are_reported() -> None:
    calls = itertools.count()

    def raises(w: Tensors) -> dict[str, torch.Tensor]:
        raise RuntimeError("no such expert")

    def grows(w: Tensors) -> dict[str, torch.Tensor]:
        return {"live": torch.zeros(4 + next(calls))}

    specs = {"w": ((4,), F32)}
    with pytest.raises(PlanError, match="failed on load 1, of coded values: RuntimeError: no such expert"):
        probe(raises, specs)
    with pytest.raises(PlanError, match="differ between loads"):
        probe(grows, specs)
    with pytest.raises(PlanError, match="without a plain storage"):
        probe(lambda w: {"live": torch.zeros(4, device="meta")}, specs)
    with pytest.raises(ValueError, match="cannot be probed"):
        probe(grows, {"w": ((4,), torch.complex128)})


def test_empty_and_scalar_canonical_tensors() -> None:
    specs = {"none": ((0, 4), BF16), "scale": ((), F32), "w": ((2, 2), BF16)}

    def load(w: Tensors) -> dict[str, torch.Tensor]:
        return {n: t.clone() for n, t in w.items()}

    plan = probe(load, specs)
    assert plan.mapped == set(specs)
    got = plan.gather(load({n: torch.full(s, 3.0, dtype=d) for n, (s, d) in specs.items()}))
    assert {n: tuple(t.shape) for n, t in got.items()} == {"none": (0, 4), "scale": (), "w": (2, 2)}
    assert got["scale"].item() == 3.0
    check_plan(plan, load, specs)


def layer(index: int, tiles: bool = True) -> Callable[[Tensors], dict[str, torch.Tensor]]:
    def load(w: Tensors) -> dict[str, torch.Tensor]:
        both = torch.cat([w[f"layers.{index}.gate"], w[f"layers.{index}.up"]])
        return {f"model.{index}.w13": cpu_pack(both) if tiles else both}

    return load


def layer_specs(index: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {f"layers.{index}.{p}": ((32, 24), BF16) for p in ("gate", "up")}


def test_a_plan_of_one_layer_is_verified_on_others() -> None:
    plan = probe(layer(0), layer_specs(0), num_draws=1)
    other = plan.renamed(lambda n: n.replace("layers.0", "layers.7"), lambda n: n.replace("model.0", "model.7"))
    other.verify_on(layer(7), layer_specs(7))
    with pytest.raises(ValueError, match="become equal"):
        plan.renamed(lambda n: "same", lambda n: n)
    with pytest.raises(PlanError, match="other canonical tensors"):
        plan.verify_on(layer(7), layer_specs(7))
    with pytest.raises(PlanError, match="does not hold here"):
        other.verify_on(layer(7, tiles=False), layer_specs(7))
    with pytest.raises(PlanError, match="live tensors are not those"):
        other.verify_on(lambda w: {"x": layer(7)(w)["model.7.w13"]}, layer_specs(7))

    def one_more(w: Tensors) -> dict[str, torch.Tensor]:
        out = layer(7)(w)
        out["model.7.w13"].view(torch.int16)[0, 0] ^= 1
        return out

    with pytest.raises(PlanError, match=r"layers\.7\.gate"):
        other.verify_on(one_more, layer_specs(7))


def test_verification_sees_live_bytes_that_the_plan_does_not_know() -> None:
    def load(extra: bool) -> Callable[[Tensors], dict[str, torch.Tensor]]:
        return lambda w: {"live": w["w"].clone(), "max": w["w"].amax() if extra else torch.zeros((), dtype=BF16)}

    specs = {"w": ((24, 20), BF16)}
    plan = probe(load(False), specs)
    assert plan.mapped == {"w"}
    with pytest.raises(PlanError, match="max"):
        plan.verify_on(load(True), specs)


def test_plans_are_saved_under_their_digest(tmp_path: Path) -> None:
    plan = probe(layer(0), layer_specs(0), num_draws=1)
    path = plan.save(tmp_path)
    assert path.name == f"{plan.digest}.layouts"
    back = ProbedPlan.load(path)
    assert back == ProbedPlan.decode(plan.encode())
    assert back.digest == plan.digest
    assert dict(back.layouts) == dict(sorted(plan.layouts.items()))
    data = bytearray(path.read_bytes())
    for at in range(0, len(data), 7):
        flipped = bytearray(data)
        flipped[at] ^= 1
        path.write_bytes(flipped)
        with pytest.raises(FormatError, match="it was changed"):
            ProbedPlan.load(path)
    for length in range(0, len(data), 11):
        with pytest.raises(FormatError):
            ProbedPlan.decode(bytes(data[:length]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["specs"].reverse(), "one encoding"),
        (lambda d: d.update(format=1), "of format 1"),
        (lambda d: d.update(kind="x"), "expected a megasync.probed-plan"),
        (lambda d: d.update(extra=1), "cannot be read"),
        (lambda d: d["specs"][0].__setitem__(2, "float"), "one encoding"),
        (lambda d: d["specs"][0].__setitem__(2, "save"), "does not have"),
        (lambda d: d.update(layouts=d["layouts"][:-1]), "cannot be read"),
    ],
)
def test_plan_documents_are_not_believed(change: Callable[[dict], None], message: str) -> None:
    document = msgspec.msgpack.decode(probe(layer(0), layer_specs(0), num_draws=1).encode())
    change(document)
    with pytest.raises(FormatError, match=message):
        ProbedPlan.decode(msgspec.msgpack.encode(document, order="deterministic"))


def test_plans_with_layouts_that_leave_their_storage_are_refused() -> None:
    plan = probe(layer(0), layer_specs(0), num_draws=1)
    small = tuple(
        type(r)(r.name, r.dtype, r.shape, r.stride, r.offset, r.storage, r.storage_nbytes - 2) for r in plan.live
    )
    forged = ProbedPlan(plan.specs, plan.layouts, small, {}, {})
    with pytest.raises(PlanError, match="leave live storage"):
        ProbedPlan.decode(forged.encode())
    other = ProbedPlan({"layers.0.gate": ((32, 25), BF16)}, plan.layouts, plan.live, {}, {})
    with pytest.raises(PlanError, match="the plan says"):
        ProbedPlan.decode(other.encode())


def test_use_refuses_other_live_tensors_and_masks_and_touches_nothing() -> None:
    plan = probe(layer(0), layer_specs(0), num_draws=1)
    live = layer(0)({n: torch.ones(s, dtype=d) for n, (s, d) in layer_specs(0).items()})
    before = live["model.0.w13"].clone()
    mask = torch.ones(32, 24, dtype=torch.int16)
    name = "layers.0.gate"
    with pytest.raises(PlanError, match="not in the plan"):
        plan.xor_(live, {name: mask, "layers.0.down": mask})
    with pytest.raises(ValueError, match="expected"):
        plan.xor_(live, {name: mask[:5]})
    with pytest.raises(ValueError, match="expected"):
        plan.xor_(live, {name: mask.to(torch.int32)})
    with pytest.raises(PlanError, match="missing"):
        plan.xor_({}, {name: mask})
    with pytest.raises(PlanError, match="not those of the plan"):
        plan.xor_({"model.0.w13": live["model.0.w13"].t()}, {name: mask})
    with pytest.raises(PlanError, match="not those of the plan"):
        plan.gather({"model.0.w13": live["model.0.w13"].float()})
    assert torch.equal(live["model.0.w13"], before)


def test_masks_of_absent_tensors_can_be_skipped() -> None:
    # Expert parallelism: this rank's loader drops the other rank's experts.
    def load(w: Tensors) -> dict[str, torch.Tensor]:
        return {"w13": torch.stack([w["e2"], w["e3"]])}

    specs = {f"e{i}": ((8, 4), BF16) for i in range(4)}
    plan = probe(load, specs)
    assert plan.absent == ("e0", "e1")
    live = load({n: torch.zeros(s, dtype=d) for n, (s, d) in specs.items()})
    masks = {n: torch.full((8, 4), i + 1, dtype=torch.int16) for i, n in enumerate(specs)}
    with pytest.raises(PlanError, match="another rank's"):
        plan.xor_(live, masks)
    plan.xor_(live, masks, skip_absent=True)
    assert live["w13"].view(torch.int16).unique().tolist() == [3, 4]


def test_case_43_a_second_swizzled_copy_is_refreshed_too() -> None:
    def load(w: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scale": w.clone(), "mma": swizzle_blockscale(w.view(U8)).view(FP8)}

    plan = one(load, (130, 6), FP8)
    rng = np.random.default_rng(3)
    old, new = (random_tensor((130, 6), FP8, rng, finite=False) for _ in range(2))
    live, expected = load(old), load(new)
    plan.xor_(live, {"w": (old.view(U8) ^ new.view(U8))})
    assert all(torch.equal(live[n].view(U8), expected[n].view(U8)) for n in live)


@st.composite
def digit_permutations(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    radices = tuple(draw(st.lists(st.sampled_from([2, 3, 4, 5]), min_size=1, max_size=5)))
    return radices, tuple(draw(st.permutations(range(len(radices)))))


@given(digit_permutations(), st.integers(1, 2))
@settings(max_examples=25, deadline=None)
def test_any_digit_permutation_is_found(which: tuple[tuple[int, ...], tuple[int, ...]], rank: int) -> None:
    radices, order = which
    cut = len(radices) // 2 if rank == 2 else 0
    shape = (int(np.prod(radices[:cut])), int(np.prod(radices[cut:])))

    def load(w: Tensors) -> dict[str, torch.Tensor]:
        return {"live": w["w"].reshape(radices).permute(order).contiguous()}

    plan = probe(load, {"w": (shape, BF16)}, num_draws=1)
    assert plan.mapped == {"w"}
    assert len(plan.layouts["w"].records) == 1
    assert len(plan.layouts["w"].records[0].digits) <= len(radices)


@given(st.lists(st.tuples(st.integers(2, 5), st.integers(1, 1000)), min_size=1, max_size=4), st.integers(0, 50))
@settings(max_examples=100, deadline=None)
def test_tables_of_digits_are_read_back(digits: list[tuple[int, int]], base: int) -> None:
    size = int(np.prod([e for e, _ in digits]))
    z, table, stride = np.arange(size), np.full(size, base), 1
    for extent, step in digits:
        table = table + z // stride % extent * step
        stride *= extent
    length, found = digits_of(table)
    assert length == size
    assert len(found) <= len(digits)
    assert [r.stop for r in runs_of(table)] == [size]


@given(st.lists(st.integers(0, 12), min_size=1, max_size=40, unique=True))
@settings(max_examples=100, deadline=None)
def test_prefixes_are_explained_by_their_digits_and_runs_cover(values: list[int]) -> None:
    table = np.array(values)

    def explained(base: int, digits: tuple[tuple[int, int, int], ...], n: int) -> list[int]:
        z = np.arange(n)
        return (base + sum((z // s % e * t for e, s, t in digits), np.zeros(n, int))).tolist()

    length, digits = digits_of(table)
    assert explained(values[0], digits, length) == values[:length]
    runs = runs_of(table)
    assert [r.start for r in runs] == [0, *(r.stop for r in runs[:-1])]
    assert runs[-1].stop == len(values)
    for r in runs:
        assert explained(r.base, r.digits, r.stop - r.start) == values[r.start : r.stop]


def test_broadcasts_up_to_the_limit_are_copies() -> None:
    plan = one(lambda w: {"live": w.expand(MAX_COPIES, 3, 4).contiguous()}, (3, 4))
    assert len(plan.layouts["w"].records) == MAX_COPIES
    assert [r.primary for r in plan.layouts["w"].records] == [True] + [False] * (MAX_COPIES - 1)
