"""The main job in every layout: Megatron ranks train and publish, a live Hugging Face model applies, bit for bit.

The model starts with random weights; the applier alone writes the trainer's. Its logits must then be Megatron's, so a
name or row order that is wrong in the tables fails here. What gloo cannot run (expert tensor parallelism with expert
parallelism, TransformerEngine's grouped experts) is tested at plan and naming level in tests/unit/test_megatron_plan.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.megatron_setup import TinyModel
from megasync.config import ApplyConfig, PublishConfig
from megasync.receiver.applier import Applier
from megasync.sinks.local import LocalSink
from tests.distributed.full_gather import full_checkpoint
from tests.distributed.harness import run_ranks
from tests.distributed.hf_oracle import hf_model
from tests.distributed.megatron_cases import (
    TOKENS,
    Case,
    Raw,
    preload_megatron,
    quiet_megatron,
    raw_tensors,
    swapped_table,
)

preload_megatron()

_MOE = {"num_layers": 2, "num_experts": 4, "qk_norm": True}
_GLM = _MOE | {"expert_bias": True, "shared_ffn_hidden_size": 16, "moe_layers": (0, 1)}
_MLA = _GLM | {"mla": True, "num_groups": 4}
_OVERLAP = {"distributed_optimizer": True, "overlap": True}

CASES: dict[int, dict[str, Case]] = {
    1: {
        "mla": Case("deepseek", _MLA, hf="DeepseekV3"),
        "mtp": Case("glm_moe", {"num_mtp_layers": 1}, hf="Llama"),
    },
    2: {
        "tp2": Case("llama", {"num_groups": 4, "ffn_hidden_size": 32}, {"tp": 2}, hf="Llama", swaps=("gate-up", "q-k")),
        "tp2-sp": Case("llama", {"qk_norm": True}, {"tp": 2, "sequence_parallel": True}, hf="Qwen3"),
        "pp2-vpp2": Case("llama", {}, {"pp": 2, "chunks": 2}, hf="Llama"),
        "cp2": Case("llama", {}, {"cp": 2}, hf="Llama"),
        "dp2-optimizer": Case("llama", {}, {}, {"distributed_optimizer": True}, hf="Llama"),
        "dp2-overlap": Case("llama", {}, {}, _OVERLAP, hf="Llama"),
        "ep2": Case("qwen_moe", _MOE, {"ep": 2}, hf="Qwen3Moe", swaps=("gate-up",)),
        "ep2-bias-shared": Case("glm_moe", _GLM, {"ep": 2}, hf="Glm4Moe"),
        "pp2-tied": Case("llama", {"tied": True}, {"pp": 2}, hf="Llama"),
        "pp2-mtp": Case("glm_moe", {"num_mtp_layers": 1}, {"pp": 2}, hf="Llama"),
    },
    4: {
        "tp2-dp2": Case("llama", {}, {"tp": 2}, hf="Llama"),
        "cp2-dp2": Case("llama", {}, {"cp": 2}, hf="Llama"),
        "tp2-pp2": Case("llama", {}, {"tp": 2, "pp": 2}, hf="Llama"),
    },
}
_ALL = [(size, name) for size, cases in CASES.items() for name in cases]


@dataclass(frozen=True)
class Published:
    """What one rank says of one case after its last publication."""

    raws: list[Raw]
    logits: torch.Tensor | None
    durable: list[bool]


def publish_cases(rank: int, world_size: int, cases: dict[str, Case], sink_dir: str) -> dict[str, Published]:
    """Train and publish every case in one process group, each as a run of its own."""
    quiet_megatron()
    return {name: publish_case(name, case, sink_dir) for name, case in cases.items()}


def publish_case(name: str, case: Case, sink_dir: str) -> Published:
    from launch.megatron_model import build
    from launch.megatron_setup import Layout, Training
    from megasync.adapters.megatron import MegatronExporter
    from megasync.adapters.names_hf import table
    from megasync.trainer.callback import MegasyncCallback

    model = TinyModel(**case.model)
    run = build(model, Layout(**case.layout), Training(**case.training))
    sink = LocalSink(Path(sink_dir))
    config = PublishConfig(run=name, timeout_s=30, max_first_density=1)
    exporter = MegatronExporter(run.chunks, table(case.table), vocab_size=model.vocab_size)
    callback = MegasyncCallback(exporter, sink, config)
    callback.on_train_start()
    for _ in range(case.num_steps):
        run.train_step()
        callback.step_end()
    callback.flush()
    durable = [o.durable for o in callback.outcomes]
    callback.close()
    for swap in case.swaps:
        wrong = MegatronExporter(run.chunks, swapped_table(table(case.table), swap), vocab_size=model.vocab_size)
        other = MegasyncCallback(wrong, sink, replace(config, run=f"{name}-{swap}"))
        other.on_train_start()
        other.close()
    out = Published([r for c in run.chunks for r in raw_tensors(c)], run.logits(TOKENS), durable)
    run.destroy()
    return out


Reports = Callable[[int, str], tuple[Path, list[Published]]]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """Sink and reports of a case; all cases of one world size run in one process group, on first use."""

    @cache
    def run(size: int) -> tuple[Path, list[dict[str, Published]]]:
        folder = tmp_path_factory.mktemp("job")
        (folder / "sink").mkdir()
        ranks = run_ranks(publish_cases, size, folder, CASES[size], str(folder / "sink"), timeout_s=115.0)
        return folder / "sink", ranks

    def of(size: int, name: str) -> tuple[Path, list[Published]]:
        sink, ranks = run(size)
        return sink, [r[name] for r in ranks]

    return of


def live_model(case: Case) -> Any:
    """A Hugging Face model with random weights, and no checkpoint anywhere."""
    torch.manual_seed(1234)
    return hf_model(case.hf, TinyModel(**case.model)).float().eval()


def apply(model: Any, case: Case, sink: Path, run: str) -> list[int]:
    from megasync.adapters.torch_module_hf import TransformersEngine

    m = TinyModel(**case.model)
    mtp = {rf"model\.layers\.{m.num_layers + i}\..*": "no code for it" for i in range(m.num_mtp_layers)}
    applier = Applier(TransformersEngine(model, exclude=mtp), LocalSink(sink), ApplyConfig(run=run))
    applier.join()
    result = applier.update()
    return [applier.version, *result.versions]


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize(("size", "name"), _ALL)
def test_live_weights_equal_the_trainer_and_give_its_logits(size: int, name: str, reports: Reports) -> None:
    case = CASES[size][name]
    sink, ranks = reports(size, name)
    assert all(r.durable == [True] * (case.num_steps + 1) for r in ranks)
    model = live_model(case)
    assert apply(model, case, sink, name)[0] == case.num_steps
    m = TinyModel(**case.model)
    expected = full_checkpoint(
        [raw for r in ranks for raw in r.raws],
        groups=m.num_groups,
        head_dim=m.head_dim,
        vocab_size=m.vocab_size,
        num_layers=m.num_layers,
        shared="shared_expert" if case.table == "qwen_moe" else "shared_experts",
        mla=m.mla,
    )
    compare_live(model, expected, m)
    logits = next(r.logits for r in ranks if r.logits is not None)[..., : TinyModel(**case.model).vocab_size]
    torch.testing.assert_close(logits_of(model), logits, atol=1e-4, rtol=0)


def compare_live(model: Any, expected: dict[str, torch.Tensor], m: TinyModel) -> None:
    """Every live parameter, taken apart to checkpoint names with plain torch, equals the plain full gather."""
    live: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            at = name.removesuffix(".gate_up_proj")
            for e in range(m.num_experts):
                gate, up = tensor[e].chunk(2, dim=0)
                live[f"{at}.{e}.gate_proj.weight"], live[f"{at}.{e}.up_proj.weight"] = gate, up
        elif name.endswith("experts.down_proj"):
            live |= {f"{name.removesuffix('.down_proj')}.{e}.down_proj.weight": tensor[e] for e in range(m.num_experts)}
        else:
            live[name] = tensor
    mtp = tuple(f"model.layers.{m.num_layers + i}." for i in range(m.num_mtp_layers))
    for name, value in expected.items():
        if mtp and name.startswith(mtp):
            continue
        assert torch.equal(live.pop(name), value), name
    left = [n for n in live if not (n == "lm_head.weight" and m.tied)]
    assert not left, left


@pytest.mark.parametrize(("size", "name"), [(s, n) for s, n in _ALL if CASES[s][n].swaps])
def test_swapped_tables_give_other_logits(size: int, name: str, reports: Reports) -> None:
    case = CASES[size][name]
    sink, ranks = reports(size, name)
    logits = next(r.logits for r in ranks if r.logits is not None)[..., : TinyModel(**case.model).vocab_size]
    for swap in case.swaps:
        model = live_model(case)
        apply(model, case, sink, f"{name}-{swap}")
        assert (logits_of(model) - logits).abs().max() > 1e-2, swap
