"""A module with a probed plan as an engine: the engine contract, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from megasync.adapters.torch_module_probed import ProbedEngine, probe_specs
from megasync.errors import PlanError
from megasync.layout import ProbedPlan, probe
from megasync.receiver.contract import CHECKS, EngineCase, Words
from megasync.receiver.engine import Derivation
from megasync.schema import Schema
from megasync.types import TensorSpec
from tests.unit.publishing import make_schema, random_words, spec

BF16 = torch.bfloat16
SPECS = [
    spec("layers.0.gate", "BF16", (32, 24)),
    spec("layers.0.up", "BF16", (32, 24)),
    spec("head", "BF16", (8, 24)),
    spec("empty", "BF16", (0,)),
]
SCHEMA = make_schema("run", SPECS)


class Packed(nn.Module):
    """Gate above up in tiles of 16 rows, the head as it is, a scale that the loader sets to a constant."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        both = torch.cat([weights["layers.0.gate"], weights["layers.0.up"]])
        self.w13 = nn.Parameter(both.reshape(4, 16, 24).permute(0, 2, 1).contiguous().reshape(64, 24))
        self.head = nn.Parameter(weights["head"].clone())
        self.register_buffer("attn_scale", torch.ones(()))


def live(module: nn.Module) -> dict[str, torch.Tensor]:
    return {n: t.data for n, t in [*module.named_parameters(), *module.named_buffers()]}


def tensors_of(words: Words) -> dict[str, torch.Tensor]:
    return {n: torch.from_numpy(w.copy().view(np.int16)).view(BF16) for n, w in words.items()}


def load(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return live(Packed(weights))


@pytest.fixture(scope="module")
def plan() -> ProbedPlan:
    found = probe(load, probe_specs(SCHEMA), num_draws=1)
    assert found.unmapped == {}
    return found


def engine(plan: ProbedPlan, words: Words, **more: object) -> ProbedEngine:
    return ProbedEngine(Packed(tensors_of(words)), plan, **{"local": ["attn_scale"], **more})  # type: ignore[arg-type]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_engine_contract(plan: ProbedPlan, check: Callable[[EngineCase], None]) -> None:
    check(EngineCase(SCHEMA, random_words(SPECS), lambda words: engine(plan, words)))


def test_tensors_that_the_plan_does_not_know_are_named(plan: ProbedPlan) -> None:
    other = make_schema(
        "run", [*SPECS[:1], spec("layers.0.up", "BF16", (32, 25)), *SPECS[2:], spec("more", "F32", (3,))]
    )
    with pytest.raises(PlanError, match=r"another shape or dtype: more, layers\.0\.up\. Nothing was touched"):
        engine(plan, random_words(SPECS)).layouts(other)


def test_excluded_tensors_need_no_place(plan: ProbedPlan) -> None:
    draft = make_schema("run", [*SPECS, TensorSpec("draft.weight", "BF16", (4, 4))])
    found = engine(plan, random_words(SPECS), exclude={r"draft\..*": "no draft model"})
    assert set(found.layouts(draft)) == {t.name for t in SPECS if t.num_words}


def test_live_weights_that_nothing_reaches_are_named(plan: ProbedPlan) -> None:
    words = random_words(SPECS)
    with pytest.raises(PlanError, match=r"no tensor of the run reaches: attn_scale\."):
        engine(plan, words, local=[]).layouts(SCHEMA)
    with pytest.raises(PlanError, match=r"no tensor of the run reaches: head\."):
        engine(plan, words).layouts(make_schema("run", SPECS[:2]))


def test_live_tensors_of_another_shape_are_named(plan: ProbedPlan) -> None:
    found = engine(plan, random_words(SPECS))
    found.module.head = nn.Parameter(torch.zeros(24, 8, dtype=BF16).T)
    with pytest.raises(PlanError, match=r"not those of the plan: head\."):
        found.layouts(SCHEMA)
    del found.module.head
    with pytest.raises(PlanError, match=r"not those of the plan: head\."):
        found.layouts(SCHEMA)


def test_value_transforms_are_refused_with_their_reason() -> None:
    def halves(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        out = load(weights)
        out["head"] = weights["head"] * 0.5
        return out

    computed = probe(halves, probe_specs(SCHEMA), num_draws=1)
    with pytest.raises(PlanError, match=r"no mask can update: head \(value transform.*computed from it: \['head'\]\)"):
        engine(computed, random_words(SPECS)).layouts(SCHEMA)


class Scaled(nn.Module):
    """A weight, the larger of two scales, and a bound of the weight: the last two are no moves."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(weights["w"].t().contiguous())
        self.register_buffer("scale", torch.maximum(weights["a"], weights["b"]))
        self.register_buffer("bound", bound(weights["w"]))


def bound(weight: torch.Tensor) -> torch.Tensor:
    return weight.float().nan_to_num(0, 0, 0).abs().amax(1)


SCALED = [spec("w", "BF16", (8, 6)), spec("a", "F32", (1,)), spec("b", "F32", (1,))]
SCALED_SCHEMA = make_schema("run", SCALED)
OF_SCALES = Derivation("scales", ("a", "b"), ("scale",), lambda t: {"scale": torch.maximum(t["a"], t["b"])})
OF_WEIGHT = Derivation("bounds", ("w",), ("bound",), lambda t: {"bound": bound(t["w"])})


@pytest.fixture(scope="module")
def scaled_plan() -> ProbedPlan:
    found = probe(lambda w: live(Scaled(w)), probe_specs(SCALED_SCHEMA))
    assert found.mapped == frozenset()
    assert found.sources == {"scale": ("a", "b"), "bound": ("w",)}
    return found


def scaled_weights(words: Words) -> dict[str, torch.Tensor]:
    return {
        "w": torch.from_numpy(words["w"].copy().view(np.int16)).view(BF16).reshape(8, 6),
        **{n: torch.from_numpy(words[n].copy().view(np.float32)) for n in ("a", "b")},
    }


def scaled_engine(plan: ProbedPlan, words: Words, derivations: list[Derivation]) -> ProbedEngine:
    weights = scaled_weights(words)
    return ProbedEngine(
        Scaled(weights), plan, derivations=derivations, seed=lambda name, box: weights[name].reshape(box.extent)
    )


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_engine_contract_with_derivations_of_what_the_plan_says_is_computed(
    scaled_plan: ProbedPlan, check: Callable[[EngineCase], None]
) -> None:
    words = random_words(SCALED)
    for name, value in (("a", 0.5), ("b", 0.25)):
        words[name] = np.array([value], dtype=np.float32).view(words[name].dtype)
    check(EngineCase(SCALED_SCHEMA, words, lambda w: scaled_engine(scaled_plan, w, [OF_SCALES, OF_WEIGHT])))


def test_derivations_may_be_a_subclasss_and_read_what_is_moved(scaled_plan: ProbedPlan) -> None:
    class Own(ProbedEngine):
        def derivations(self, schema: Schema) -> list[Derivation]:
            return [OF_SCALES, OF_WEIGHT]

    found = Own(Scaled(scaled_weights(random_words(SCALED))), scaled_plan)
    # The weight is read where it lies; the scales lie nowhere and get shadows.
    assert set(found.layouts(SCALED_SCHEMA)) == {"w"}
    assert found.derivations(SCALED_SCHEMA) == [OF_SCALES, OF_WEIGHT]


def test_derivations_must_follow_all_that_is_computed(scaled_plan: ProbedPlan) -> None:
    words = random_words(SCALED)
    with pytest.raises(
        PlanError, match=r"no mask can update: w \(moved, but also .*no tensor of the run reaches: bound"
    ):
        scaled_engine(scaled_plan, words, [OF_SCALES]).layouts(SCALED_SCHEMA)
    half = Derivation("scales", ("a",), ("scale",), lambda t: {"scale": t["a"]})
    with pytest.raises(PlanError, match=r"no mask can update: b \(value transform[^.]*\. Nothing was touched"):
        scaled_engine(scaled_plan, words, [half, OF_WEIGHT]).layouts(SCALED_SCHEMA)
    other = Derivation("bounds", ("w", "a", "b"), ("scale",), lambda t: {"scale": t["a"]})
    with pytest.raises(PlanError, match=r"w \(moved.*derivations that read it leave out \['bound'\]\)"):
        scaled_engine(scaled_plan, words, [other]).layouts(SCALED_SCHEMA)


def test_what_another_rank_holds_is_left_out() -> None:
    """Of a rank that drops the up projection; alone, the engine would lack it."""

    def without_up(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return load({**weights, "layers.0.up": torch.zeros(32, 24, dtype=BF16)})

    part = probe(without_up, probe_specs(SCHEMA), num_draws=1)
    assert part.absent == ("layers.0.up",)
    one = engine(part, random_words(SPECS))
    with pytest.raises(PlanError, match=r"no mask can update: layers\.0\.up \(no live tensor depends on it"):
        one.layouts(SCHEMA)
    one.num_ranks = 2
    assert set(one.layouts(SCHEMA)) == {"layers.0.gate", "head"}
