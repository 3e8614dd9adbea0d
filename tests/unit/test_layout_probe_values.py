"""The probe on values that loaders treat otherwise than the rest, and on hidden dependences."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch

from megasync.errors import PlanError
from megasync.layout import ProbedPlan, arrange, probe
from megasync.layout.conformance import ConformanceError, check_layouts, check_plan
from megasync.layout.probe_draws import Draws
from megasync.layout.probe_patterns import FLOATS, random_tensor
from megasync.layout.probe_values import special_words
from tests.unit.layout_oracles import BF16, F32, FP8, U8, raw

Tensors = Mapping[str, torch.Tensor]
Change = Callable[[torch.Tensor], torch.Tensor]


def of_one(change: Change, shape: tuple[int, ...], dtype: torch.dtype, **more: object) -> ProbedPlan:
    return probe(lambda w: {"live": change(w["w"])}, {"w": (shape, dtype)}, num_draws=1, **more)  # type: ignore[arg-type]


def words_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(U8).numpy().view(f"<u{tensor.dtype.itemsize}")


# --- special values


@pytest.mark.parametrize("name", sorted(FLOATS))
def test_special_words_are_what_torch_reads_them_as(name: str) -> None:
    dtype = getattr(torch, name)
    words = special_words(dtype)
    values = [
        torch.from_numpy(np.array(w, dtype=f"<u{dtype.itemsize}").view("u1")).view(dtype).double().numpy()
        for w in (words.finite, words.other)
    ]
    assert np.isfinite(values[0]).all()
    assert not np.isfinite(values[1]).any()
    limits = torch.finfo(dtype)
    assert limits.max in values[0]
    assert limits.smallest_normal in values[0] or name == "float8_e8m0fnu"
    assert 1.0 in values[0]
    if name != "float8_e8m0fnu":
        assert {0.0, limits.min, -1.0} <= set(values[0])
        assert (np.abs(values[0][values[0] != 0]) < limits.smallest_normal).any()
    if not name.endswith(("fnuz", "fnu")):
        assert any(v == 0 and np.signbit(v) for v in values[0])


@pytest.mark.parametrize("name", sorted(FLOATS))
def test_finite_random_bits_reach_all_finite_patterns_and_no_other(name: str) -> None:
    dtype = getattr(torch, name)
    drawn = random_tensor((20000,), dtype, np.random.default_rng(0), finite=True)
    assert np.isfinite(drawn.double().numpy()).all()
    if dtype.itemsize == 1:
        every = torch.arange(256, dtype=torch.int32).to(U8).view(dtype)
        assert set(raw(drawn).tolist()) == set(raw(every[every.float().isfinite()]).tolist())


@pytest.mark.parametrize("dtype", [F32, BF16, FP8, torch.int8, torch.bool])
@pytest.mark.parametrize("size", [1, 4, 200])
def test_every_word_list_is_seen_whole_by_every_tensor(dtype: torch.dtype, size: int) -> None:
    draws = Draws({"a": ((size,), dtype), "b": ((), F32), "c": ((50, 7), BF16)}, 0)
    words = special_words(dtype)
    for finite, wanted in ((True, words.finite), (False, words.other)):
        seen = {int(w) for d in draws.specials(finite=finite) for w in words_of(d.tensors["a"])}
        assert seen >= set(wanted)
        assert not wanted or seen <= {0, *wanted}


RARE: dict[str, Change] = {
    "zero becomes one": lambda w: torch.where(w == 0, torch.ones_like(w), w),
    "minus zero becomes zero": lambda w: torch.where(w == 0, torch.zeros_like(w), w),
    "infinity becomes large": lambda w: torch.where(w.isinf(), torch.full_like(w, 3e38), w),
    "subnormals are flushed": lambda w: torch.where(w.abs() < 1.18e-38, torch.zeros_like(w), w),
    "clamped to 448": lambda w: w.clamp(max=448.0),
    "no less than 1e-12": lambda w: w.clamp(min=1e-12),
    "NaN is made quiet": lambda w: torch.where(w.isnan(), torch.full_like(w, float("nan")), w),
    "the largest only": lambda w: torch.where(w == torch.finfo(w.dtype).max, torch.ones_like(w), w),
}


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", [(), (4,), (64, 1), (64, 40)], ids=str)
@pytest.mark.parametrize("rare", sorted(RARE))
def test_a_loader_that_rewrites_a_rare_value_is_no_mover(rare: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for seed in range(2):
        plan = of_one(RARE[rare], shape, dtype, seed=seed)
        assert plan.mapped == frozenset()
        assert plan.sources == {"live": ("w",)}


def test_float8_minus_zero_that_the_other_format_reads_as_no_number() -> None:
    def load(w: torch.Tensor) -> torch.Tensor:
        return torch.where(w.view(U8) == 0x80, torch.zeros((), dtype=U8), w.view(U8))

    assert of_one(load, (1,), FP8).mapped == frozenset()


def test_without_any_bytes_the_plan_is_exact_for_finite_values() -> None:
    assert of_one(RARE["infinity becomes large"], (4,), F32, any_bytes=False).mapped == {"w"}
    assert of_one(RARE["zero becomes one"], (4,), F32, any_bytes=False).mapped == frozenset()
    assert of_one(RARE["subnormals are flushed"], (4,), F32, any_bytes=False).mapped == frozenset()


def test_verification_and_conformance_see_rare_values() -> None:
    specs = {"w": ((4,), F32)}
    plan = of_one(lambda w: w.clone(), (4,), F32)

    def rewrites(w: Tensors) -> dict[str, torch.Tensor]:
        return {"live": RARE["zero becomes one"](w["w"])}

    with pytest.raises(PlanError, match=r"does not hold here: \['w'\]"):
        plan.verify_on(rewrites, specs)
    with pytest.raises(ConformanceError, match="does not hold"):
        check_plan(plan, rewrites, specs)
    layouts = {"w": arrange((4,), word_nbytes=4).to("live")}
    check_layouts(layouts, lambda w: {"live": w["w"].clone()}, specs)
    with pytest.raises(
        ConformanceError, match="of zeros, subnormals, limits and powers of the dtype: live bytes are not"
    ):
        check_layouts(layouts, rewrites, specs)
    check_layouts(layouts, lambda w: {"live": RARE["infinity becomes large"](w["w"])}, specs, finite=True)


@pytest.mark.parametrize("shape", [(1,), (4,), (30, 7)], ids=str)
def test_a_tensor_that_is_left_out_when_it_is_zero_throughout(shape: tuple[int, ...]) -> None:
    specs = dict.fromkeys(("bias", "other"), (shape, BF16))
    plan = probe(lambda w: {"b": w["bias"] if bool(w["bias"].any()) else w["other"]}, specs, num_draws=1)
    assert plan.mapped == frozenset()
    assert plan.sources == {"b": ("bias", "other")}


def test_one_of_two_scales_that_is_taken_when_the_other_is_zero() -> None:
    specs = dict.fromkeys(("a", "b"), ((1,), F32))
    plan = probe(lambda w: {"s": torch.where(w["a"] != 0, w["a"], w["b"])}, specs)
    assert plan.mapped == frozenset()
    assert plan.absent == ()
    assert plan.sources == {"s": ("a", "b")}


# --- dependences


HIDDEN: dict[str, Change] = {
    "count of negatives": lambda w: (w < 0).sum().reshape(1),
    "sum of the negative": lambda w: w.float().nan_to_num(0, 0, 0).clamp(max=0).sum(1),
    "sign bits": lambda w: (w.view(torch.int16) < 0).to(U8),
    "any NaN": lambda w: w.isnan().any().reshape(1),
    "outliers": lambda w: (w.abs() > 100).to(U8),
    "any zero": lambda w: (w == 0).any().reshape(1),
    "all zero": lambda w: (w == 0).all().reshape(1),
    "all equal": lambda w: (w == w[0, 0]).all().reshape(1),
    "all negative": lambda w: (w < 0).all().reshape(1),
    "largest magnitude": lambda w: w.abs().amax(1),
}


@pytest.mark.parametrize("hidden", sorted(HIDDEN))
def test_what_a_live_tensor_is_computed_from_is_found_whatever_it_looks_at(hidden: str) -> None:
    def load(w: Tensors) -> dict[str, torch.Tensor]:
        return {"p": w["w"].clone(), "q": w["b"].clone(), "m": HIDDEN[hidden](w["w"])}

    specs = {"w": ((64, 40), BF16), "b": ((3,), BF16)}
    plan = probe(load, specs)
    assert plan.mapped == {"b"}
    # The move itself is kept: a derivation may read it there.
    assert set(plan.layouts) == {"w", "b"}
    assert plan.unmapped == {
        "w": "moved, but also the source of a value transform; live tensors computed from it: ['m']"
    }
    assert plan.sources == {"m": ("w",)}
    live = load({n: torch.zeros(s, dtype=d) for n, (s, d) in specs.items()})
    with pytest.raises(PlanError, match="nothing was touched: w: moved, but also"):
        plan.xor_(live, {"w": torch.ones(64, 40, dtype=BF16)})
    check_plan(plan, load, specs)


def test_sums_of_signed_codes() -> None:
    # As int8 kernels keep beside their weights.
    plan = probe(
        lambda w: {"w": w["w"].clone(), "sum": w["w"].to(torch.int32).clamp(max=0).sum(1)},
        {"w": ((16, 16), torch.int8)},
    )
    assert plan.mapped == frozenset()


@pytest.mark.parametrize("needed", [2, 3])
def test_sources_that_matter_only_together_are_all_found(needed: int) -> None:
    names = [f"t{i}" for i in range(7)]

    def load(w: Tensors) -> dict[str, torch.Tensor]:
        joint = sum(bool((w[f"t{i}"].float() < 0).all()) for i in (1, 3, 6)) >= needed
        return {n: w[n].clone() for n in names} | {"flag": torch.tensor([joint])}

    plan = probe(load, dict.fromkeys(names, ((40,), BF16)))
    assert plan.sources == {"flag": ("t1", "t3", "t6")}
    assert plan.mapped == {"t0", "t2", "t4", "t5"}


def test_a_plan_that_forgets_a_dependence_is_refused() -> None:
    def load(w: Tensors) -> dict[str, torch.Tensor]:
        return {"p": w["w"].clone(), "b": w["b"].clone(), "m": HIDDEN["outliers"](w["w"])}

    specs = {"w": ((64, 40), BF16), "b": ((3,), BF16)}
    plan = probe(load, specs)
    for derived in ({}, dict(plan.derived)):
        forged = ProbedPlan(plan.specs, plan.layouts, plan.live, {}, derived)
        with pytest.raises(PlanError, match="m"):
            forged.verify_on(load, specs)
        with pytest.raises(ConformanceError, match="does not hold"):
            check_plan(forged, load, specs)


def test_changes_that_nothing_explains_unmap_every_tensor() -> None:
    # Changes with the positions that the probe spells, and never again.
    spelt = itertools.count()

    def load(w: Tensors) -> dict[str, torch.Tensor]:
        return {"live": w["w"].clone(), "state": torch.tensor([2 <= next(spelt) < 5])}

    plan = probe(load, {"w": ((24, 20), BF16)})
    assert plan.mapped == frozenset()
    assert plan.unmapped["w"] == (
        "live tensors change for a reason that was not found, it may be this tensor: ['state']"
    )
    assert plan.sources == {"state": ("w",)}


def test_reasons_name_moves_of_bytes() -> None:
    def swapped(w: torch.Tensor) -> torch.Tensor:
        return w.view(U8).reshape(-1, 2).flip(1).reshape(-1)

    def shifted(w: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.zeros(1, dtype=U8), w.view(U8).reshape(-1)])

    for load in (swapped, shifted):
        plan = of_one(load, (24, 20), BF16)
        assert plan.unmapped["w"].startswith("its bytes are moved, but not as whole words: inside them (a byte swap)")
    assert of_one(lambda w: w.float().square(), (24, 20), BF16).unmapped["w"].startswith("value transform;")
