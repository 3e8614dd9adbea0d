"""A Megatron chunk whose parameters TransformerEngine keeps quantised: the records come from the parameters themselves.

The parameters are tensor subclasses without memory of their own and with TransformerEngine's attribute layout; they refuse
to be computed with, so that nothing is ever dequantised.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)

from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

from megasync.adapters.megatron import MegatronExporter
from megasync.adapters.names_hf import DEEPSEEK, LLAMA, QWEN_MOE
from megasync.errors import PlanError, ReplicaDriftError
from megasync.quant import fp8, nvfp4
from megasync.quant.formulas import formula
from megasync.trainer.metadata import exchange
from megasync.trainer.replicas import check_replicas
from megasync.types import Box
from tests.golden.quant_inputs import bell
from tests.unit.test_megatron_plan import FakeModel, leaf
from tests.unit.test_quant_transformer_engine import _fp8_block, _fp8_tensor, _nvfp4

HEADS = {"num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 16}


class Quantised(torch.Tensor):
    """What TransformerEngine's storages are: a shape and a dtype, and attributes that hold the bytes."""

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], storage: SimpleNamespace) -> Quantised:
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16, requires_grad=False)
        made.__dict__.update(vars(storage))
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            (other,) = args
            return Quantised(tuple(other.shape), SimpleNamespace(**other.__dict__))
        raise AssertionError(f"{func} on a quantised parameter would dequantise it")


def _weight(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(bell(rows, columns, seed) * 0.02).to(torch.bfloat16)


def _param(kind: Any, weight: torch.Tensor, *more: Any) -> torch.nn.Parameter:
    return torch.nn.Parameter(Quantised(tuple(weight.shape), kind(weight, *more)), requires_grad=False)


def _layer(kind: Any, shared: torch.Tensor | None = None) -> tuple[FakeModel, dict[str, Any], dict[str, torch.Tensor]]:
    """Fused QKV and gate-up of layer 1, whole; a plain norm beside them."""
    values = {"qkv": _weight(128, 64, 1), "fc1": _weight(256, 128, 2)}
    more = () if shared is None else (shared,)
    params: dict[str, Any] = {n: _param(kind, w, *more) for n, w in values.items()}
    params["norm"] = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    at = "decoder.layers.1."
    leaves = {
        "q": leaf(at + "self_attention.linear_qkv.weight", params["qkv"]),
        "f": apply_swiglu_sharded_factory(leaf(at + "mlp.linear_fc1.weight", params["fc1"]), ()),
        "n": leaf(at + "self_attention.linear_qkv.layer_norm_weight", params["norm"]),
    }
    return FakeModel(leaves, HEADS, **params), params, values


def _whole(exporter: MegatronExporter) -> dict[str, torch.Tensor]:
    """Every tensor put together from what an owner of everything would read."""
    boxes = [(p.name, p.box) for p in exporter.pieces()]
    specs = exporter.specs()
    owned = exporter.own(boxes, specs)
    exporter.settle()
    shapes = {s.name: s.shape for s in specs}
    out: dict[str, torch.Tensor] = {}
    for p in owned:
        assert tuple(p.data.shape) == p.box.extent
        whole = out.setdefault(p.name, torch.full(shapes[p.name], 99, dtype=torch.float64))
        whole[tuple(slice(a, a + n) for a, n in zip(p.box.start, p.box.extent, strict=True))] = p.data.double()
    return out


def _rows(values: dict[str, torch.Tensor]) -> dict[str, tuple[str, list[int]]]:
    """Which rows of which parameter each canonical weight is: query groups of 2 heads, one key and one value."""
    q = [r for g in range(2) for r in range(g * 64, g * 64 + 32)]
    at = "model.layers.1."
    return {
        at + "self_attn.q_proj": ("qkv", q),
        at + "self_attn.k_proj": ("qkv", [r for g in range(2) for r in range(g * 64 + 32, g * 64 + 48)]),
        at + "self_attn.v_proj": ("qkv", [r for g in range(2) for r in range(g * 64 + 48, g * 64 + 64)]),
        at + "mlp.gate_proj": ("fc1", list(range(128))),
        at + "mlp.up_proj": ("fc1", list(range(128, 256))),
    }


def test_nvfp4_parameters_need_no_hand_made_records() -> None:
    model, params, values = _layer(_nvfp4)
    exporter = MegatronExporter([model], LLAMA)
    whole = _whole(exporter)
    assert exporter.settle_always
    for name, (source, rows) in _rows(values).items():
        storage = params[source]
        columns = values[source].shape[1]
        assert torch.equal(whole[f"{name}.weight"], storage._rowwise_data[rows].double())
        assert torch.equal(whole[f"{name}.weight_scale"], storage._rowwise_scale_inv[rows, : columns // 16].double())
        decode = nvfp4.decode_scale(nvfp4.amax(values[source]), formula("nvfp4/te-2d"))
        assert float(whole[f"{name}.weight_scale_2"]) == float(decode)
    assert torch.equal(whole["model.layers.1.input_layernorm.weight"], torch.ones(64).double())
    specs = {s.name: s for s in exporter.specs()}
    assert specs["model.layers.1.self_attn.q_proj.weight"].formula == "nvfp4/te-stored@1"
    assert specs["model.layers.1.self_attn.q_proj.weight"].group == "model.layers.1.self_attn.q_proj+k_proj+v_proj"
    assert specs["model.layers.1.mlp.up_proj.weight"].layer == 1


def test_the_trainer_casts_the_next_step_into_the_same_memory() -> None:
    model, params, values = _layer(_nvfp4)
    exporter = MegatronExporter([model], LLAMA)
    first = _whole(exporter)
    other = _nvfp4(values["qkv"] * 2)
    for name in ("_rowwise_data", "_rowwise_scale_inv", "_amax_rowwise"):
        getattr(params["qkv"], name).copy_(getattr(other, name))
    exporter.check_alive()
    again = _whole(exporter)
    name = "model.layers.1.self_attn.k_proj"
    assert torch.equal(again[f"{name}.weight_scale_2"], first[f"{name}.weight_scale_2"] * 2)
    assert torch.equal(again[f"{name}.weight"], first[f"{name}.weight"])
    params["qkv"]._rowwise_data = params["qkv"]._rowwise_data.clone()
    with pytest.raises(PlanError, match=r"q_proj.*moved since the plan"):
        exporter.check_alive()
    model.fc1 = _param(_nvfp4, values["fc1"])  # a new parameter object: the pieces look at the old one
    with pytest.raises(PlanError, match="moved since"):
        exporter.check_alive()


def test_fp8_parameters_of_both_storages() -> None:
    model, params, values = _layer(_fp8_tensor)
    whole = _whole(MegatronExporter([model], LLAMA))
    for name, (source, rows) in _rows(values).items():
        assert torch.equal(whole[f"{name}.weight"], params[source]._data[rows].double())
        assert float(whole[f"{name}.weight_scale"]) == float(params[source]._scale_inv)
    fc1 = _weight(256, 128, 5)
    param = _param(_fp8_block, fc1)
    model = FakeModel(
        {"f": apply_swiglu_sharded_factory(leaf("decoder.layers.0.mlp.linear_fc1.weight", param), ())}, HEADS, fc1=param
    )
    whole = _whole(MegatronExporter([model], LLAMA))
    q = fp8.quantize(fc1, formula("fp8/te-128-pow2"))
    at = "model.layers.0.mlp."
    assert torch.equal(whole[at + "up_proj.weight"], q.codes[128:].double())
    assert torch.equal(whole[at + "gate_proj.weight_scale_inv"], q.scales[:1].double())
    assert torch.equal(whole[at + "up_proj.weight_scale_inv"], q.scales[1:].double())


def test_grouped_experts_of_one_expert_parallel_rank() -> None:
    """``weight{i}`` per local expert, experts 2 and 3 of 4, gate and up fused in each."""
    leaves: dict[str, Any] = {}
    params: dict[str, Any] = {}
    values = {}
    for i in range(2):
        expert = 2 + i
        values[expert] = _weight(64, 32, expert)
        params[f"fc1_weight{i}"] = _param(_nvfp4, values[expert])
        where = ((0, expert, 4),)
        gated = leaf("decoder.layers.1.mlp.experts.experts.linear_fc1.weight", params[f"fc1_weight{i}"], *where, axes=1)
        leaves[f"fc1.weight{i}"] = apply_swiglu_sharded_factory(gated, where)
    whole = _whole(MegatronExporter([FakeModel(leaves, HEADS, **params)], QWEN_MOE))
    for expert, w in values.items():
        q = nvfp4.quantize(w, nvfp4.amax(w), formula("nvfp4/te-2d"))
        at = f"model.layers.1.mlp.experts.{expert}."
        assert torch.equal(whole[at + "gate_proj.weight"], q.codes[:32].double())
        assert torch.equal(whole[at + "up_proj.weight_scale"], q.scales[32:].double())


def test_a_tensor_parallel_shard_lies_where_its_leaf_says() -> None:
    w = _weight(64, 128, 7)
    param = _param(_nvfp4, w)
    leaves = {"o": leaf("decoder.layers.0.self_attention.linear_proj.weight", param, (1, 1, 2))}
    exporter = MegatronExporter([FakeModel(leaves, HEADS, o=param)], LLAMA, checkpoint="compressed-tensors")
    boxes = {p.name.rsplit(".", 1)[1]: p.box for p in exporter.pieces()}
    assert boxes["weight_packed"] == Box((0, 64), (64, 64))
    assert boxes["weight_scale"] == Box((0, 8), (64, 8))
    specs = {s.name.rsplit(".", 1)[1]: s for s in exporter.specs()}
    assert specs["weight_packed"].shape == (64, 128)
    assert specs["weight_packed"].cut == "last"


def test_case_79_drift_of_stored_pieces_is_named() -> None:
    """One rank holds a weight twice (an MTP copy, say): codes, scales and global scale are compared as they are stored."""
    w = _weight(64, 128, 8)
    at = "decoder.layers.0.self_attention.linear_proj.weight"
    for name, change in (
        ("o_proj.weight ", lambda p: p._rowwise_data[5, 5].bitwise_xor_(1)),
        ("o_proj.weight_scale ", lambda p: p._rowwise_scale_inv[7, 3].bitwise_xor_(1)),
    ):
        params = [_param(_nvfp4, w) for _ in range(2)]
        models = [FakeModel({"o": leaf(at, p)}, HEADS, o=p) for p in params]
        with pytest.raises(PlanError, match="twice, in different memory"):
            MegatronExporter(models, LLAMA).specs()
        exporters = [MegatronExporter([m], LLAMA) for m in models]
        schema, holdings = exchange("run", exporters[0], None)
        pieces = [p for e in exporters for p in e.pieces()]
        for e in exporters:
            e.own([], schema.tensors)
            e.settle()
        report = check_replicas(schema, holdings, pieces, None)
        assert (report.num_boxes > 2, report.num_unread) == (True, 0)
        change(params[1])
        with pytest.raises(ReplicaDriftError, match=name):
            check_replicas(schema, holdings, pieces, None)


def test_case_34_fused_partners_with_different_amaxes_are_refused() -> None:
    """Latent down projections are parameters of their own, which engines run as one matrix."""
    at = "decoder.layers.0.self_attention.linear_"
    config = HEADS | {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_pos_emb_head_dim": 16}
    query, latent = _weight(32, 64, 10), _weight(32, 64, 11) * 2
    shared = torch.maximum(nvfp4.amax(query), nvfp4.amax(latent))
    for amaxes in ((), (shared,)):
        params = {"q": _param(_nvfp4, query, *amaxes), "kv": _param(_nvfp4, latent, *amaxes)}
        leaves = {n: leaf(f"{at}{n}_down_proj.weight", p) for n, p in params.items()}
        exporter = MegatronExporter([FakeModel(leaves, config, **params)], DEEPSEEK)
        exporter.own([], exporter.specs())
        if amaxes:
            exporter.settle()
            continue
        with pytest.raises(PlanError, match=r"q_a_proj\+kv_a_proj_with_mqa; reduce the amax"):
            exporter.settle()


def test_what_cannot_be_read_is_listed() -> None:
    model, params, _ = _layer(_nvfp4)
    params["qkv"]._rowwise_data = None
    params["fc1"]._with_gemm_swizzled_scales = True
    with pytest.raises(PlanError) as caught:
        MegatronExporter([model], LLAMA).specs()
    text = str(caught.value)
    assert "column-wise" in text
    assert "swizzled" in text
    tied = _param(_nvfp4, _weight(64, 64, 9))
    model = FakeModel(
        {"e": leaf("embedding.word_embeddings.weight", tied)}, HEADS, e=tied, share_embeddings_and_output_weights=True
    )
    with pytest.raises(PlanError, match="keep tied weights unquantised"):
        MegatronExporter([model], LLAMA, vocab_size=64).specs()


def test_unquantised_chunks_are_not_settled_for_nothing() -> None:
    plain = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    model = FakeModel({"n": leaf("decoder.final_layernorm.weight", plain)}, HEADS, n=plain)
    exporter = MegatronExporter([model], LLAMA)
    exporter.own([(p.name, p.box) for p in exporter.pieces()], exporter.specs())
    assert not exporter.settle_always
    assert exporter.settle() == 0.0
