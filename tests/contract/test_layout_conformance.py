"""The conformance suite of layouts: accepts what is right, and catches the traps that engines set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from megasync.errors import PlanError
from megasync.layout import Layout, ProbedPlan, arrange, probe, with_copies
from megasync.layout import experts as E
from megasync.layout.conformance import (
    ConformanceError,
    check_content,
    check_layout,
    check_layouts,
    check_plan,
    check_read,
)

BF16, U8 = torch.bfloat16, torch.uint8
Tensors = Mapping[str, torch.Tensor]


def tiles(t: torch.Tensor) -> torch.Tensor:
    n, k = t.shape
    return t.reshape(n // 16, 16, k).permute(0, 2, 1).contiguous().reshape(n, k)


TILES = arrange((32, 24), word_nbytes=2).split(0, 16).permute((0, 2, 1)).to("w")
PLAIN = arrange((32, 24), word_nbytes=2).to("w")


def test_a_right_layout_conforms() -> None:
    check_layout(TILES, lambda t: {"w": tiles(t)}, BF16)


def test_conformance_errors_are_assertions() -> None:
    assert issubclass(ConformanceError, AssertionError)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (PLAIN, "live bytes are not the canonical ones"),
        (arrange((32, 24), word_nbytes=2).to("w", base=1), "leave live storage"),
        (arrange((32, 24), word_nbytes=2).to("v"), "no live storage is called"),
        (replace(TILES, records=()), "hold 0 of the 768 words"),
        (with_copies(TILES, PLAIN), "share places"),
    ],
)
def test_wrong_layouts_are_caught(layout: Layout, message: str) -> None:
    with pytest.raises(ConformanceError, match=message):
        check_layout(layout, lambda t: {"w": tiles(t)}, BF16)


def test_a_forgotten_copy_is_caught() -> None:
    with pytest.raises(ConformanceError, match=r"'image' differs from a fresh load"):
        check_layout(PLAIN, lambda t: {"w": t.clone(), "image": tiles(t)}, BF16)


def test_a_stale_copy_is_caught() -> None:
    both = with_copies(PLAIN, replace_storage(TILES, "image"))
    check_layout(both, lambda t: {"w": t.clone(), "image": tiles(t)}, BF16)
    with pytest.raises(ConformanceError, match="image"):
        check_layout(both, lambda t: {"w": t.clone(), "image": t.clone()}, BF16)


def replace_storage(layout: Layout, storage: str) -> Layout:
    return replace(layout, records=tuple(replace(r, storage=storage) for r in layout.records))


def test_names_must_agree() -> None:
    with pytest.raises(ConformanceError, match="the specs of"):
        check_layouts({"a": PLAIN}, lambda w: {"w": w["b"]}, {"b": ((32, 24), BF16)})


def test_trap_an_empty_live_parameter() -> None:
    """The engine handed the weight to an opaque handle: shape (0,)."""
    with pytest.raises(ConformanceError, match="keeps these weights elsewhere"):
        check_layout(PLAIN, lambda t: {"w": torch.empty(0, dtype=BF16)}, BF16)
    plan = probe(lambda w: {"w": torch.empty(0, dtype=BF16)}, {"w": ((32, 24), BF16)}, num_draws=1)
    assert plan.empty == ("w",)
    assert plan.absent == ("w",)
    with pytest.raises(PlanError, match="without elements"):
        plan.xor_({"w": torch.empty(0, dtype=BF16)}, {"w": torch.zeros(32, 24, dtype=BF16)})


class Engine:
    """A head that computes with its live weight, or with a copy of it that was packed at load."""

    def __init__(self, weight: torch.Tensor, *, packed: bool) -> None:
        self.weight = weight
        self._read = tiles(weight) if packed else weight
        self._packed = packed

    def flip(self) -> None:
        self.weight.view(torch.int16).bitwise_xor_(1)

    def logits(self) -> bytes:
        n, k = self.weight.shape
        w = self._read.reshape(n // 16, k, 16).permute(0, 2, 1).reshape(n, k) if self._packed else self._read
        return (w.double() @ torch.linspace(-1, 1, k, dtype=torch.float64)).numpy().tobytes()


@pytest.mark.parametrize("packed", [False, True])
def test_trap_a_live_parameter_that_nobody_reads(packed: bool) -> None:
    """Shape and content are right, but the kernel may compute with its own copy: only behaviour shows it."""
    weight = torch.randn(32, 24, generator=torch.Generator().manual_seed(0)).to(BF16)
    engine = Engine(weight.clone(), packed=packed)
    check_content({"w": PLAIN}, {"w": engine.weight.reshape(-1).view(U8)}, {"w": weight})
    if packed:
        with pytest.raises(ConformanceError, match=r"lm_head\.weight: flipping its bits changes nothing"):
            check_read("lm_head.weight", engine.flip, engine.logits)
    else:
        check_read("lm_head.weight", engine.flip, engine.logits)
    assert torch.equal(engine.weight, weight)


def test_self_tests_need_a_repeatable_observation_and_an_exact_return() -> None:
    counter = iter(range(100))
    with pytest.raises(ConformanceError, match="two observations"):
        check_read("w", lambda: None, lambda: bytes([next(counter)]))
    state = [0]

    def drift() -> None:
        state[0] += 1

    with pytest.raises(ConformanceError, match="does not restore"):
        check_read("w", drift, lambda: bytes(state))


def test_trap_the_same_shape_in_another_order() -> None:
    """The engine keeps (E, 2 I, H) and packs tiles of 16 rows inside: shapes agree, the content proof does not."""
    specs = {f"{e}.{p}": ((16, 24), BF16) for e in range(2) for p in ("gate", "up")}

    def load(w: Tensors) -> dict[str, torch.Tensor]:
        return {"w13": torch.stack([tiles(torch.cat([w[f"{e}.gate"], w[f"{e}.up"]])) for e in range(2)])}

    def layouts(steps: E.Steps) -> dict[str, Layout]:
        out = {}
        for name, (shape, _) in specs.items():
            place = E.Place(int(name[0]), 2)
            rows = E.w13_rows(name[2:], shape, place, word_nbytes=2, order="gate_first")  # type: ignore[arg-type]
            out[name] = E.stacked(rows, place, "w13", steps)
        return out

    base = {n: torch.randn(s, generator=torch.Generator().manual_seed(1)).to(d) for n, (s, d) in specs.items()}
    live = {n: t.reshape(-1).view(U8) for n, t in load(base).items()}
    check_content(layouts(E.cpu_tiles), live, base)
    with pytest.raises(ConformanceError, match=r"0\.gate in \['w13'\]: \d+ of 768 bytes.*1\.up"):
        check_content(layouts(E.as_is), live, base)
    plan = probe(load, specs, num_draws=1)
    assert plan.mapped == set(specs)
    check_content(plan.layouts, live, base)


def test_plans_that_do_not_hold_are_caught() -> None:
    specs = {"w": ((32, 24), BF16)}
    plan = probe(lambda w: {"w": tiles(w["w"])}, specs, num_draws=1)
    check_plan(plan, lambda w: {"w": tiles(w["w"])}, specs)
    with pytest.raises(ConformanceError, match="does not hold"):
        check_plan(plan, lambda w: {"w": w["w"].clone()}, specs)
    with pytest.raises(ConformanceError, match="does not hold"):
        check_plan(plan, lambda w: {"w": tiles(w["w"])}, {"w": ((32, 26), BF16)})
    eager = ProbedPlan(plan.specs, plan.layouts, plan.live, {}, {})
    check_plan(eager, lambda w: {"w": tiles(w["w"])}, specs)
