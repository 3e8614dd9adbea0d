"""The Megatron exporter in every parallel layout: tiling, replicas, a plain full gather, and Hugging Face's own logits.

What gloo cannot run is covered elsewhere: expert tensor parallelism with expert parallelism is planned here without a
train step; TransformerEngine's grouped experts and fused MLA projections are in tests/unit/test_megatron_plan.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from launch.megatron_setup import TinyModel
from megasync.types import TensorSpec
from tests.distributed.full_gather import full_checkpoint, gather_raw
from tests.distributed.harness import run_ranks
from tests.distributed.hf_oracle import hf_logits
from tests.distributed.megatron_cases import TOKENS, Case, Part, Report, preload_megatron, run_cases

preload_megatron()

_QWEN = {"num_layers": 2, "num_experts": 4, "qk_norm": True}
_GLM = _QWEN | {"expert_bias": True, "shared_ffn_hidden_size": 16, "moe_layers": (0, 1)}
_MLA = _GLM | {"mla": True, "num_groups": 4}
_OVERLAP = {"distributed_optimizer": True, "overlap": True}

CASES: dict[int, dict[str, Case]] = {
    1: {
        "mla": Case("deepseek", _MLA, hf="DeepseekV3"),
        "mla-plain-q": Case("deepseek", _MLA | {"q_lora_rank": 0, "qk_norm": False}),
        "mtp": Case("glm_moe", {"num_mtp_layers": 1}, hf="Llama"),
        "mtp-tied": Case("glm_moe", {"num_mtp_layers": 1, "tied": True}, hf="Llama"),
    },
    2: {
        "tp2": Case("llama", {"num_groups": 4, "ffn_hidden_size": 32}, {"tp": 2}, hf="Llama", swaps=("gate-up", "q-k")),
        "tp2-sp": Case("llama", {"qk_norm": True}, {"tp": 2, "sequence_parallel": True}, hf="Qwen3"),
        "tp2-bias": Case("llama", {"qkv_bias": True}, {"tp": 2}, hf="Qwen2"),
        "tp2-one-group": Case("llama", {"num_groups": 1}, {"tp": 2}, hf="Llama"),
        "tp2-stacked": Case("llama", {}, {"tp": 2}, metadata={}, num_steps=1),
        "tp2-singletons": Case("llama", {}, {"tp": 2}, metadata={"singleton_local_shards": True}, num_steps=1),
        "tp2-passthrough": Case("passthrough", {}, {"tp": 2}),
        "pp2-vpp2": Case("llama", {}, {"pp": 2, "chunks": 2}, hf="Llama"),
        "cp2": Case("llama", {}, {"cp": 2}, hf="Llama"),
        "dp2": Case("llama", {}, {}, {"distributed_optimizer": False}, hf="Llama"),
        "dp2-optimizer": Case("llama", {}, {}, {"distributed_optimizer": True}, hf="Llama"),
        "dp2-overlap": Case("llama", {}, {}, _OVERLAP, hf="Llama"),
        "dp2-overlap-bf16": Case("llama", {}, {}, _OVERLAP | {"bf16": True}),
        "ep2": Case("qwen_moe", _QWEN, {"ep": 2}, hf="Qwen3Moe", swaps=("gate-up",)),
        "ep2-stacked": Case("qwen_moe", _QWEN, {"ep": 2}, metadata={}, num_steps=1),
        "ep2-singletons": Case("qwen_moe", _QWEN, {"ep": 2}, metadata={"singleton_local_shards": True}, num_steps=1),
        "ep2-bias-shared": Case("glm_moe", _GLM, {"ep": 2}, hf="Glm4Moe"),
        "ep2-bf16": Case("glm_moe", _GLM, {"ep": 2}, {"bf16": True}),
        "tp2-mla": Case("deepseek", _MLA, {"tp": 2, "etp": 2, "sequence_parallel": True}, hf="DeepseekV3"),
        "pp2-tied": Case("llama", {"tied": True}, {"pp": 2}, hf="Llama"),
        "pp2-mtp": Case("glm_moe", {"num_mtp_layers": 1}, {"pp": 2}, hf="Llama"),
    },
    4: {
        "tp2-dp2": Case("llama", {}, {"tp": 2}, hf="Llama"),
        "cp2-dp2": Case("llama", {}, {"cp": 2}, hf="Llama"),
        "tp2-pp2": Case("llama", {}, {"tp": 2, "pp": 2}, hf="Llama"),
        "tp2-sp-ep2": Case("qwen_moe", _QWEN, {"tp": 2, "ep": 2, "sequence_parallel": True}, hf="Qwen3Moe"),
        "etp2-ep2": Case("glm_moe", _GLM, {"tp": 2, "ep": 2, "etp": 2, "sequence_parallel": True}, num_steps=0),
    },
}
_ALL = [(size, name) for size, cases in CASES.items() for name in cases]

Reports = Callable[[int, str], list[Report]]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """What each rank reported on a case. All cases of one world size run in one process group, on first use."""

    @cache
    def run(size: int) -> list[dict[str, Report]]:
        return run_ranks(run_cases, size, tmp_path_factory.mktemp("ranks"), CASES[size], timeout_s=110.0)

    return lambda size, name: [ranks[name] for ranks in run(size)]


def specs_of(ranks: list[Report]) -> dict[str, TensorSpec]:
    """Specs of all ranks; those of one tensor must be equal."""
    specs: dict[str, TensorSpec] = {}
    for rank in ranks:
        for spec in rank.specs:
            assert specs.setdefault(spec.name, spec) == spec, f"ranks disagree on {spec.name}"
    return specs


def assemble(parts: list[Part], specs: dict[str, TensorSpec]) -> dict[str, torch.Tensor]:
    """Canonical tensors from the pieces of all ranks; every word must be covered, and replicas must be equal."""
    tensors: dict[str, torch.Tensor] = {}
    seen: dict[str, torch.Tensor] = {}
    boxes: dict[str, set] = {}
    for part in parts:
        spec = specs[part.name]
        whole = tensors.setdefault(part.name, torch.zeros(spec.shape, dtype=part.data.dtype))
        times = seen.setdefault(part.name, torch.zeros(spec.shape, dtype=torch.int32))
        at = tuple(slice(a, a + n) for a, n in zip(part.box.start, part.box.extent, strict=True))
        assert part.data.shape == part.box.extent
        if part.box in boxes.setdefault(part.name, set()):
            assert torch.equal(whole[at], part.data), f"replicas of {part.name} {part.box} differ"
            continue
        boxes[part.name].add(part.box)
        whole[at] = part.data
        times[at] += 1
    for name, times in seen.items():
        assert (times == 1).all(), f"{name}: words covered {times.unique().tolist()} times"
    return tensors


@pytest.mark.parametrize(("size", "name"), [(s, n) for s, n in _ALL if CASES[s][n].table != "passthrough"])
def test_pieces_tile_and_equal_a_plain_full_gather(size: int, name: str, reports: Reports) -> None:
    case, ranks = CASES[size][name], reports(size, name)
    model, specs = TinyModel(**case.model), specs_of(ranks)
    tensors = assemble([p for r in ranks for p in r.parts], specs)
    assert tensors.keys() == specs.keys()
    expected = full_checkpoint(
        [raw for r in ranks for raw in r.raws],
        groups=model.num_groups,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size,
        num_layers=model.num_layers,
        shared="shared_expert" if case.table == "qwen_moe" else "shared_experts",
        mla=model.mla,
    )
    if model.tied:
        expected.pop("lm_head.weight", None)
    assert tensors.keys() == expected.keys()
    for tensor, value in expected.items():
        assert tensors[tensor].dtype == value.dtype, tensor
        assert torch.equal(tensors[tensor], value), tensor
        assert specs[tensor].shape == tuple(value.shape)


def test_pass_through_keeps_global_tensors(reports: Reports) -> None:
    ranks = reports(2, "tp2-passthrough")
    tensors = assemble([p for r in ranks for p in r.parts], specs_of(ranks))
    expected = gather_raw([raw for r in ranks for raw in r.raws])
    renamed = {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }
    for old, new in renamed.items():
        expected = {n.replace(old, new): t for n, t in expected.items()}
    expected = {n: t for n, t in expected.items() if "inv_freq" not in n}
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(tensors[name], value), name


@pytest.mark.parametrize(("size", "name"), [(s, n) for s, n in _ALL if CASES[s][n].hf])
def test_hugging_face_gives_the_same_logits(size: int, name: str, reports: Reports, tmp_path: Path) -> None:
    case, ranks = CASES[size][name], reports(size, name)
    model = TinyModel(**case.model)
    tensors = assemble([p for r in ranks for p in r.parts], specs_of(ranks))
    expected = next(r.logits for r in ranks if r.logits is not None)[..., : model.vocab_size]
    found = hf_logits(case.hf, model, tensors, tmp_path, TOKENS)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("size", "name", "swap"), [(s, n, w) for s, n in _ALL for w in CASES[s][n].swaps], ids=lambda v: str(v)
)
def test_a_swapped_table_changes_the_logits(size: int, name: str, swap: str, reports: Reports, tmp_path: Path) -> None:
    case, ranks = CASES[size][name], reports(size, name)
    model = TinyModel(**case.model)
    tensors = assemble([p for r in ranks for p in r.swapped[swap]], specs_of(ranks))
    expected = next(r.logits for r in ranks if r.logits is not None)[..., : model.vocab_size]
    found = hf_logits(case.hf, model, tensors, tmp_path, TOKENS)
    assert (found - expected).abs().max() > 1e-2


@pytest.mark.parametrize(("size", "name"), [(1, "mtp-tied"), (2, "pp2-tied"), (2, "pp2-mtp"), (2, "tp2")])
def test_case_82_tied_and_mtp_copies_are_aliases_of_one_tensor(size: int, name: str, reports: Reports) -> None:
    specs = specs_of(reports(size, name))
    aliases = {s.name: s.aliases for s in specs.values() if s.aliases}
    mtp_embedding, mtp_output = "model.layers.4.embed_tokens.weight", "model.layers.4.shared_head.head.weight"
    assert (
        aliases
        == {
            "mtp-tied": {"model.embed_tokens.weight": ("lm_head.weight", mtp_embedding, mtp_output)},
            "pp2-tied": {"model.embed_tokens.weight": ("lm_head.weight",)},
            "pp2-mtp": {"model.embed_tokens.weight": (mtp_embedding,), "lm_head.weight": (mtp_output,)},
            "tp2": {},
        }[name]
    )


def test_case_53_a_tied_embedding_is_held_by_first_and_last_stage(reports: Reports) -> None:
    for name in ("pp2-tied", "pp2-mtp"):
        holders = [{p.name for p in r.parts} for r in reports(2, name)]
        assert all("model.embed_tokens.weight" in names for names in holders)


def test_virtual_stages_report_their_chunk(reports: Reports) -> None:
    for rank, report in enumerate(reports(2, "pp2-vpp2")):
        layers = {int(p.name.split(".")[2]): p.chunk for p in report.parts if p.name.startswith("model.layers.")}
        assert layers == {rank: 0, rank + 2: 1}


def test_layer_and_cut_axis_of_every_spec(reports: Reports) -> None:
    specs = specs_of(reports(2, "ep2-bias-shared"))
    for name, spec in specs.items():
        assert spec.layer == (int(name.split(".")[2]) if name.startswith("model.layers.") else -1)
        assert spec.cut == ("last" if name.endswith(("o_proj.weight", "down_proj.weight")) else "row")


def test_case_50_expert_bias_stays_fp32_in_a_bf16_model(reports: Reports) -> None:
    ranks = reports(2, "ep2-bf16")
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    specs = specs_of(ranks)
    assert specs[bias].dtype == "F32"
    assert specs[bias].shape == (4,)
    assert {s.dtype for n, s in specs.items() if n != bias} == {"BF16"}
    for rank in ranks:
        volatile = [p for p in rank.parts if p.volatile]
        assert [p.name for p in volatile] == [bias]
        assert volatile[0].data.dtype == torch.float32
        assert volatile[0].data.abs().max() > 0


def test_case_56_expert_names_are_global(reports: Reports) -> None:
    for rank, report in enumerate(reports(2, "ep2")):
        experts = {int(p.name.split(".")[5]) for p in report.parts if ".experts." in p.name}
        assert experts == {2 * rank, 2 * rank + 1}


def test_only_overlapped_gathers_take_time(reports: Reports) -> None:
    assert all(r.settle_s > 0 for r in reports(2, "dp2-overlap"))
    assert all(r.settle_s == 0 for r in reports(2, "dp2-optimizer"))
