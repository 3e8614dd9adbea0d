"""The probe on vLLM's CPU engine: its own model classes, loaders and post-processing, experts packed in tiles included.

Needs the package of vLLM for CPUs (bash launch/nightly.sh vllm makes an environment with it). What vLLM does with a weight
depends on the CPU: with AVX-512 or AMX it hands linear layers to libraries that keep them in opaque memory. That is then
what must be said of them, and tests of the plain layouts are skipped.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM for CPUs: bash launch/nightly.sh vllm", allow_module_level=True)

from megasync.adapters.torch_module_probed import ProbedEngine, probe_specs
from megasync.errors import PlanError
from megasync.layout import ProbedPlan, probe
from megasync.layout.conformance import ConformanceError, check_content, check_layouts, check_plan
from megasync.layout.live import describe, storages_of
from megasync.receiver.contract import CHECKS, EngineCase, Words
from tests.engines import vllm_models as models
from tests.unit.publishing import make_schema, random_words, spec

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600), pytest.mark.slow]

Load = Callable[[dict[str, torch.Tensor]], Any]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense layer and experts": ("moe", {}),
    "experts of padded width": ("moe", {"inner": 48}),
    "dense": ("llama", {}),
    "tied embeddings": ("llama", {"tied": True}),
}


class Vllm:
    """vLLM in this process, imported once; configurations by case."""

    def __init__(self, folder: Path) -> None:
        from vllm.platforms import current_platform

        from megasync.adapters import vllm_probe

        if not current_platform.is_cpu():
            pytest.skip(f"this vLLM is for {current_platform.device_name}; these tests are of the one for CPUs")
        self.probing, self._folder = vllm_probe, folder
        self._configs: dict[str, Any] = {}

    def config(self, kind: str, dtype: str = "bfloat16", **how: Any) -> Any:
        name = f"{kind}-{dtype}-{'-'.join(f'{k}{v}' for k, v in how.items())}"
        if name not in self._configs:
            config = models.hf_config(kind, **how)
            self._configs[name] = models.engine_config(self._folder / name, config, dtype)
        return self._configs[name]


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    torch.set_num_threads(1)
    found = Vllm(tmp_path_factory.mktemp("vllm"))
    with found.probing.process_groups(found.config("moe")):
        yield found


def prepared(vllm: Vllm, case: str) -> tuple[Any, models.Specs, ProbedPlan]:
    kind, how = CASES[case]
    load, tensors = vllm.probing.loader(vllm.config(kind, **how)), models.specs(kind, **how)
    plan = probe(load, tensors, num_draws=1)
    if plan.empty:
        assert all("live tensors without elements" in plan.unmapped[n] for n in plan.absent)
        pytest.skip(f"this CPU has vLLM keep {len(plan.empty)} weights in opaque memory, as the plan says by name")
    return load, tensors, plan


@pytest.mark.parametrize("case", CASES)
def test_every_checkpoint_tensor_is_found_without_a_rule(vllm: Vllm, case: str) -> None:
    load, tensors, plan = prepared(vllm, case)
    assert plan.unmapped == {}
    assert (dict(plan.derived), plan.absent, plan.unstable) == ({}, (), ())
    assert set(plan.layouts) == set(tensors)
    check_plan(plan, load, tensors)
    check_layouts(plan.layouts, load, tensors)


@pytest.mark.parametrize("case", CASES)
def test_masks_in_checkpoint_names_make_the_live_tensors_of_a_cold_load(vllm: Vllm, case: str) -> None:
    load, tensors, plan = prepared(vllm, case)
    old, new = models.random_weights(tensors, 1), models.random_weights(tensors, 2)
    warm, cold = load({n: t.clone() for n, t in old.items()}), load({n: t.clone() for n, t in new.items()})
    before = {n: t.data_ptr() for n, t in warm.items()}
    plan.xor_(warm, models.masks(old, new))
    assert not [n for n in cold if not models.same_bytes(warm[n], cold[n])]
    assert {n: t.data_ptr() for n, t in warm.items()} == before
    read = plan.gather(warm)
    assert not [n for n in new if not models.same_bytes(read[n], new[n])]


def test_experts_lie_in_tiles_of_rows_and_the_naive_plan_is_refused(vllm: Vllm) -> None:
    """The live stacks keep the shape that a stack of the checkpoint has; only the bytes are in another order."""
    load, tensors, plan = prepared(vllm, "dense layer and experts")
    weights = models.random_weights(tensors, 3)
    live = load({n: t.clone() for n, t in weights.items()})
    at = "model.layers.1.mlp.experts"
    gate_up = [torch.cat([weights[f"{at}.{e}.{n}_proj.weight"] for n in ("gate", "up")]) for e in range(models.EXPERTS)]
    (record,) = plan.layouts[f"{at}.2.up_proj.weight"].records
    stack = live[record.storage]
    assert stack.shape == torch.stack(gate_up).shape
    if models.same_bytes(stack, torch.stack(gate_up)):
        pytest.skip("this CPU has vLLM keep experts as they are stacked")
    assert len(record.digits) == 3
    storages = storages_of(live, describe(live))
    check_content(plan.layouts, storages, weights)
    plain = probe(
        lambda w: {record.storage: torch.stack([torch.cat([*w.values()])] * 1)},
        {n: tensors[n] for n in (f"{at}.0.gate_proj.weight", f"{at}.0.up_proj.weight")},
        num_draws=1,
    )
    with pytest.raises(ConformanceError, match=r"experts\.0\.gate_proj.*live bytes|live bytes.*experts\.0\.gate_proj"):
        check_content(plain.layouts, storages, {n: weights[n] for n in plain.specs})


def test_a_plan_of_one_layer_holds_for_another(vllm: Vllm) -> None:
    """Layer by layer: a copy with one layer is probed, its plan is verified on the other layer of the whole model."""
    one, other = "model.layers.0.", "model.layers.1."
    config, tensors = vllm.config("all-moe"), models.specs("all-moe")
    mine = {n: s for n, s in tensors.items() if n.startswith(one)}
    rest = models.random_weights({n: s for n, s in tensors.items() if n not in mine}, 4)
    outer = {n: t for n, t in rest.items() if not n.startswith(other)}
    short = vllm.probing.loader(config, num_layers=1)
    whole = vllm.probing.loader(config)

    def layer_of(live: dict[str, torch.Tensor], at: str) -> dict[str, torch.Tensor]:
        return {n.replace(at, one): t for n, t in live.items() if n.startswith(at)}

    plan = probe(lambda w: layer_of(short({**outer, **w}), one), mine, num_draws=1)
    if plan.empty:
        pytest.skip("this CPU has vLLM keep linear layers in opaque memory")
    assert plan.unmapped == {}

    def second(w: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        moved = {n.replace(one, other): t for n, t in w.items()}
        return layer_of(whole({**outer, **models.random_weights(mine, 5), **moved}), other)

    plan.verify_on(second, mine)
    moved = plan.renamed(lambda n: n.replace(one, other), lambda n: n.replace(one, other))
    assert set(moved.layouts) == {n for n in tensors if n.startswith(other)}


def test_saved_plans_are_the_same_plan(vllm: Vllm, tmp_path: Path) -> None:
    load, tensors, plan = prepared(vllm, "experts of padded width")
    again = ProbedPlan.load(plan.save(tmp_path))
    assert again.digest == plan.digest == probe(load, tensors, num_draws=1, seed=7).digest
    check_plan(again, load, tensors)


def test_weights_without_elements_are_refused_by_name(vllm: Vllm) -> None:
    """An FP32 engine hands linear layers to a library that keeps them in opaque memory; the live parameter is empty.

    What it widens from BF16 is only moved, into the upper half of each word, and stays mapped.
    """
    load, tensors = vllm.probing.loader(vllm.config("llama", dtype="float32")), models.specs("llama")
    plan = probe(load, tensors, num_draws=1)
    check_plan(plan, load, tensors)
    (record,) = plan.layouts["model.norm.weight"].records
    assert (record.word_nbytes, record.base, [d.dst_stride for d in record.digits]) == (2, 1, [2])
    linear = "model.layers.0.self_attn.o_proj.weight"
    if linear not in plan.empty:
        pytest.skip("this vLLM keeps FP32 linear layers in their parameters")
    assert set(plan.absent) == {n for n in tensors if "_proj" in n} == set(plan.unmapped)
    assert "no live tensor depends on it" in plan.unmapped[linear]
    assert "live tensors without elements" in plan.unmapped[linear]


def test_casts_are_refused_by_name_and_nothing_is_touched(vllm: Vllm) -> None:
    """A BF16 checkpoint in an FP16 engine: every weight is a value transform."""
    load, tensors = vllm.probing.loader(vllm.config("llama", dtype="float16")), models.specs("llama")
    plan = probe(load, tensors, num_draws=1)
    assert plan.mapped == frozenset()
    assert set(plan.unmapped) == set(tensors)
    assert all("value transform" in why for n, why in plan.unmapped.items() if n not in plan.absent)
    assert "model.norm.weight" in plan.derived["model.norm.weight"]
    live = load(models.random_weights(tensors, 6))
    before = {n: t.clone() for n, t in live.items()}
    with pytest.raises(PlanError, match=r"masks cannot be applied, nothing was touched: model\.norm\.weight: value"):
        plan.xor_(live, {"model.norm.weight": torch.ones(models.HIDDEN, dtype=torch.int16)})
    assert not [n for n, t in before.items() if not models.same_bytes(t, live[n])]


@pytest.fixture(scope="module")
def engine_case(vllm: Vllm) -> EngineCase:
    """The experts' model behind the engine port, with the probed plan and no rule."""
    _, tensors, plan = prepared(vllm, "dense layer and experts")
    described = [spec(n, "BF16", shape) for n, (shape, _) in tensors.items()]
    schema = make_schema("run", described)
    assert probe_specs(schema) == tensors

    def load(words: Words) -> ProbedEngine:
        weights = {n: torch.from_numpy(w.copy().view(np.int16)).view(torch.bfloat16) for n, w in words.items()}
        return ProbedEngine(vllm.probing.load(vllm.config("moe"), weights), plan, local=vllm.probing.LOCAL)

    return EngineCase(schema, random_words(described), load)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_engine_contract(engine_case: EngineCase, check: Callable[[EngineCase], None]) -> None:
    check(EngineCase(engine_case.schema, engine_case.words, engine_case.load))


def test_a_plan_of_another_model_is_refused(vllm: Vllm, engine_case: EngineCase) -> None:
    _, _, other = prepared(vllm, "experts of padded width")
    model = vllm.probing.load(vllm.config("moe"), models.random_weights(models.specs("moe"), 8))
    with pytest.raises(PlanError, match=r"knows with another shape or dtype: .*experts\.0\.gate_proj"):
        ProbedEngine(model, other).layouts(engine_case.schema)
