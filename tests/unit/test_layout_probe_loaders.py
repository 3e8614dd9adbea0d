"""The probe on loaders that leave noise, fail, refuse values or return what they must not; and its arguments."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch

from megasync.errors import PlanError
from megasync.layout import ProbedPlan, probe
from megasync.layout.conformance import ConformanceError, check_plan
from megasync.layout.probe_draws import Draws
from megasync.layout.probe_patterns import ALPHABETS
from megasync.layout.probe_values import alphabets_of
from tests.unit.layout_oracles import BF16, F32, U8

Tensors = Mapping[str, torch.Tensor]
Change = Callable[[torch.Tensor], torch.Tensor]


def of_one(change: Change, shape: tuple[int, ...], dtype: torch.dtype, **more: object) -> ProbedPlan:
    return probe(lambda w: {"live": change(w["w"])}, {"w": (shape, dtype)}, num_draws=1, **more)  # type: ignore[arg-type]


def words_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(U8).numpy().view(f"<u{tensor.dtype.itemsize}")


# --- noise


def padded(rows: int, fill: Callable[[torch.Tensor], object]) -> Callable[[Tensors], dict[str, torch.Tensor]]:
    def load(w: Tensors) -> dict[str, torch.Tensor]:
        out = torch.empty(6 + rows, 10, dtype=BF16)
        fill(out)
        out[:6] = w["w"]
        return {"live": out}

    return load


@pytest.mark.parametrize("rows", [1, 64, 594])
def test_padding_of_any_bytes_is_nobodys(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)

    def scribble(out: torch.Tensor) -> None:
        out.view(torch.int16).random_(-(1 << 15), (1 << 15) - 1, generator=generator)

    for load, named in ((padded(rows, scribble), True), (padded(rows, lambda out: None), False)):
        for seed in range(6):
            plan = probe(load, {"w": ((6, 10), BF16)}, seed=seed)
            assert plan.unmapped == {}
            assert plan.derived == {}
            assert plan.unstable == ("live",) or not named
            check_plan(plan, load, {"w": ((6, 10), BF16)})


def test_counters_clocks_and_dice_are_nobodys() -> None:
    for seed in range(6):
        dice, ticks = random.Random(seed), itertools.count()

        def load(w: Tensors) -> dict[str, torch.Tensor]:
            tick = next(ticks)  # noqa: B023
            rolls = [dice.random() for _ in range(5)]  # noqa: B023
            return {
                "live": w["w"].clone(),
                "dice": torch.tensor(rolls),
                "count": torch.tensor([tick]),
                # Bytes that change rarely: seldom between two equal loads.
                "clock": torch.tensor([1.7e9 + 0.3 * tick], dtype=torch.float64),
            }

        plan = probe(load, {"w": ((6, 10), BF16)}, seed=seed)
        assert plan.unmapped == {}
        assert set(plan.unstable) == {"dice", "count", "clock"}


def test_noise_in_a_computed_tensor_does_not_hide_what_it_is_computed_from() -> None:
    dice = random.Random(1)

    def load(w: Tensors) -> dict[str, torch.Tensor]:
        total = w["w"].float().nan_to_num(0, 0, 0).clamp(-9, 9).sum()
        return {"live": w["w"].clone(), "sum": total * (1 + 1e-6 * dice.random())}

    plan = probe(load, {"w": ((6, 10), BF16)})
    assert plan.sources == {"sum": ("w",)}
    assert plan.unstable == ("sum",)


# --- calls


def test_dtypes_by_name_and_extents_of_any_sequence() -> None:
    plan = probe(
        lambda w: {n: t.clone() for n, t in w.items()},
        {"a": ([4, 3], "bfloat16"), "b": (torch.Size([5]), "torch.float32")},  # type: ignore[dict-item]
    )
    assert plan.specs == {"a": ((4, 3), BF16), "b": ((5,), F32)}
    assert plan.mapped == {"a", "b"}
    plan.verify_on(lambda w: {n: t.clone() for n, t in w.items()}, {"a": ((4, 3), "bfloat16"), "b": ((5,), F32)})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        (((4,), "BF16"), ValueError, "names the dtype 'BF16'; expected a torch one, like 'bfloat16'"),
        (((4,), np.float32), TypeError, "expected a torch.dtype"),
        ((4, BF16), TypeError, "expected \\(extents, torch dtype\\)"),
        (BF16, TypeError, "expected \\(extents, torch dtype\\)"),
        (((-4,), BF16), ValueError, "extents"),
    ],
)
def test_specs_that_are_none_are_refused_by_name(spec: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"spec of 'w' .*{message}"):
        probe(lambda w: {}, {"w": spec})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "the loader returned NoneType; expected live tensors by name"),
        ([torch.zeros(1)], "the loader returned list; expected live tensors by name"),
        (np.zeros(3), "the loader returned ndarray"),
        ({"p": np.zeros(3), "q": torch.zeros(1)}, r"must be torch tensors by name, found 'p' \(ndarray\)"),
        ({"p": None}, r"found 'p' \(NoneType\)"),
        ({0: torch.zeros(3)}, r"by name, found 0 \(Tensor\)"),
    ],
)
def test_what_a_loader_must_not_return_is_said(result: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        probe(lambda w: result, {"w": ((4,), BF16)})  # type: ignore[arg-type, return-value]


def positive(w: Tensors) -> dict[str, torch.Tensor]:
    if not bool(((w["scale"] > 0) & (w["scale"] < 1e6)).all()):
        raise ValueError("scales must be positive")
    return {"w": w["w"].t().contiguous(), "scale": w["scale"].clone()}


POSITIVE = {"w": ((6, 10), BF16), "scale": ((), F32)}


def test_a_loader_that_raises_names_what_it_refuses_and_takes_a_range() -> None:
    why = (
        r"ValueError: scales must be positive\. It refuses what 'scale' holds: values from -\S+ to -\S+\. Give.*values="
    )
    with pytest.raises(PlanError, match=why):
        probe(positive, POSITIVE)
    plan = probe(positive, POSITIVE, values={"scale": (1e-8, 1e5)})
    assert plan.mapped == {"w", "scale"}
    check_plan(plan, positive, POSITIVE, values={"scale": (1e-8, 1e5)})
    with pytest.raises(ConformanceError, match=r"refuses what 'scale' holds"):
        check_plan(plan, positive, POSITIVE)


def test_a_loader_that_raises_on_no_number_says_so_and_takes_finite_values() -> None:
    def load(w: Tensors) -> dict[str, torch.Tensor]:
        if bool(w["w"].isnan().any()):
            raise RuntimeError("NaN in weights")
        return {n: t.clone() for n, t in w.items()}

    specs = {"b": ((4,), BF16), "w": ((20,), BF16), "z": ((4,), U8)}
    with pytest.raises(PlanError, match=r"refuses what 'w' holds: .*NaN or infinities among them.*any_bytes=False"):
        probe(load, specs)
    assert probe(load, specs, any_bytes=False).mapped == set(specs)


def test_a_loader_that_raises_by_itself_blames_no_tensor() -> None:
    calls = itertools.count(1)

    def load(w: Tensors) -> dict[str, torch.Tensor]:
        if next(calls) == 5:
            raise KeyError("lost")
        return {"live": w["w"].clone()}

    with pytest.raises(PlanError, match=r"failed on load 5, of values that rise.*so no value of them is at fault"):
        probe(load, {"w": ((20,), BF16)})


def test_what_equal_loads_do_not_repeat_is_said_of_tensors_that_nothing_shows() -> None:
    last = [torch.zeros(4, 8, dtype=BF16)]

    def one_behind(w: Tensors) -> dict[str, torch.Tensor]:
        last.append(w["w"].clone())
        return {"live": last[-2]}

    plan = probe(one_behind, {"w": ((4, 8), BF16)})
    assert plan.mapped == frozenset()
    assert plan.unmapped["w"].endswith("that differ between equal loads, whatever they hold: ['live']")


def test_a_range_still_finds_what_happens_inside() -> None:
    specs = {"s": ((1,), F32)}
    assert probe(lambda w: {"s": w["s"].clamp(min=1e-3)}, specs, values=(1e-8, 1e5)).mapped == frozenset()
    assert probe(lambda w: {"s": w["s"].clamp(min=1e-9)}, specs, values=(1e-8, 1e5)).mapped == {"s"}


@pytest.mark.parametrize("span", [(0.0, 1.0), (0.25, 0.5), (-3.0, -1.0), (-1.0, 1.0), (100.0, 1e4)])
@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16, torch.float64], ids=str)
def test_every_value_of_a_draw_is_inside_its_range(span: tuple[float, float], dtype: torch.dtype) -> None:
    specs = {"w": ((30,), dtype), "other": ((4,), U8)}
    draws = Draws(specs, 0, values=span)
    found = [d.tensors["w"] for d in draws.verification(2)]
    found += [draws.leveled(0, 1)["w"], draws.zeros()["w"], draws.opposite(draws.leveled(0, 1))["w"]]
    for tensor in found:
        assert bool(((tensor >= span[0]) & (tensor <= span[1])).all())
    plan = probe(lambda w: {n: t.clone() for n, t in w.items()}, specs, values=span)
    assert plan.mapped == {"w", "other"}


def test_without_a_range_the_patterns_are_the_usual_ones() -> None:
    specs = {n: ((4,), getattr(torch, n)) for n in ALPHABETS}
    assert alphabets_of(specs, {}) == ALPHABETS


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"x": (0.0, 1.0)}, "not among the canonical tensors"),
        ({"codes": (0.0, 1.0)}, "ranges are of real floats"),
        ({"w": (1.0, 1.0)}, "must be finite, and not empty"),
        ({"w": (0.0, float("inf"))}, "must be finite, and not empty"),
        ({"w": (1.0, 1.001)}, "holds fewer than 4"),
    ],
)
def test_ranges_that_are_none_are_refused(values: dict[str, tuple[float, float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        probe(lambda w: dict(w), {"w": ((4,), BF16), "codes": ((4,), U8)}, values=values)
