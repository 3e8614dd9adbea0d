"""The Megatron export plan over hand-made leaves: what no CPU run can build, and everything that must be refused.

Leaves are Megatron's own ShardedTensor records, made as its TransformerEngine modules make them; the modules are fakes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)

from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

from megasync.adapters.megatron import MegatronExporter
from megasync.adapters.names import PASSTHROUGH, NameTable, Rule
from megasync.adapters.names_hf import DEEPSEEK, LLAMA, QWEN_MOE
from megasync.errors import PlanError
from megasync.types import Box

CONFIG = {"num_layers": 2, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 2}


class FakeModel(torch.nn.Module):
    """A chunk with given parameters and leaves."""

    def __init__(self, leaves: dict[str, Any], config: dict[str, Any] | None = None, **attributes: Any) -> None:
        super().__init__()
        self.leaves = leaves
        self.config = SimpleNamespace(**(CONFIG | (config or {})))
        for name, value in attributes.items():
            setattr(self, name, value)

    def sharded_state_dict(self, prefix: str = "", metadata: Any = None) -> dict[str, Any]:
        return dict(self.leaves)


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(shape).to(dtype))


def leaf(key: str, data: torch.Tensor, *offsets: tuple[int, int, int], axes: int = 0, **kwargs: Any) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, data, *offsets, prepend_axis_num=axes, **kwargs)


def export(model: Any, names: NameTable = LLAMA, **kwargs: Any) -> MegatronExporter:
    exporter = MegatronExporter([model], names, **kwargs)
    exporter.specs()
    return exporter


def refusal(model: Any, names: NameTable = LLAMA, **kwargs: Any) -> str:
    with pytest.raises(PlanError) as caught:
        export(model, names, **kwargs)
    return str(caught.value)


def grouped_experts(ep_rank: int, tp_rank: int, tp_size: int, singleton: bool) -> tuple[FakeModel, dict[int, tuple]]:
    """TransformerEngine's grouped experts: ``weight{i}`` per local expert, 2 of 4 experts, expert tensor parallel."""
    leaves: dict[str, Any] = {}
    params, values = {}, {}
    for i in range(2):
        expert = 2 * ep_rank + i
        fc1, fc2 = weight(4, 6), weight(6, 2)
        params |= {f"fc1_weight{i}": fc1, f"fc2_weight{i}": fc2}
        values[expert] = (fc1, fc2)
        where = () if singleton else ((0, expert, 4),)
        base = f"decoder.layers.1.mlp.experts.experts.{f'{expert}.' if singleton else ''}"
        gated = leaf(f"{base}linear_fc1.weight", fc1, *where, (len(where), tp_rank, tp_size), axes=len(where))
        leaves[f"decoder.layers.1.mlp.experts.linear_fc1.weight{i}"] = apply_swiglu_sharded_factory(
            gated, where, singleton
        )
        leaves[f"decoder.layers.1.mlp.experts.linear_fc2.weight{i}"] = leaf(
            f"{base}linear_fc2.weight", fc2, *where, (1 + len(where), tp_rank, tp_size), axes=len(where)
        )
        leaves[f"decoder.layers.1.mlp.experts.linear_fc1._extra_state{i}"] = ShardedObject("extra", None, (1,), (0,))
    return FakeModel(leaves, **params), values


@pytest.mark.parametrize("singleton", [False, True])
def test_grouped_experts_with_expert_tensor_parallelism(singleton: bool) -> None:
    whole: dict[str, torch.Tensor] = {}
    parts: dict[int, dict[int, tuple]] = {0: {}, 1: {}}
    for ep_rank in range(2):
        for tp_rank in range(2):
            model, values = grouped_experts(ep_rank, tp_rank, 2, singleton)
            parts[tp_rank] |= values
            exporter = export(model, QWEN_MOE)
            shapes = {s.name: s.shape for s in exporter.specs()}
            for piece in exporter.pieces():
                tensor = whole.setdefault(piece.name, torch.full(shapes[piece.name], torch.nan))
                at = tuple(slice(a, a + n) for a, n in zip(piece.box.start, piece.box.extent, strict=True))
                assert tensor[at].isnan().all()
                tensor[at] = piece.data
    for expert in range(4):
        at = f"model.layers.1.mlp.experts.{expert}"
        fc1 = [parts[tp][expert][0].chunk(2) for tp in range(2)]
        assert torch.equal(whole[f"{at}.gate_proj.weight"], torch.cat([fc1[0][0], fc1[1][0]]))
        assert torch.equal(whole[f"{at}.up_proj.weight"], torch.cat([fc1[0][1], fc1[1][1]]))
        assert torch.equal(whole[f"{at}.down_proj.weight"], torch.cat([parts[tp][expert][1] for tp in range(2)], dim=1))
    assert len(whole) == 12


@pytest.mark.parametrize("duplicated", [True, False])
def test_fused_latent_down_projection(duplicated: bool) -> None:
    """Megatron 0.19 claims tensor-parallel shards for its two parts even where each rank holds all rows."""
    config = {"q_lora_rank": 6, "kv_lora_rank": 4, "qk_pos_emb_head_dim": 2}
    rows_q, rows_kv = (6, 6) if duplicated else (3, 3)
    fused = weight(rows_q + rows_kv, 5)
    at = "decoder.layers.0.self_attention."
    q, kv = fused.split([rows_q, rows_kv])
    model = FakeModel(
        {
            "q": leaf(at + "linear_q_down_proj.weight", q, (0, 1, 2)),
            "kv": leaf(at + "linear_kv_down_proj.weight", kv, (0, 1, 2)),
        },
        config,
        fused=fused,
    )
    pieces = {p.name: p for p in export(model, DEEPSEEK).pieces()}
    start = 0 if duplicated else 3
    q_piece = pieces["model.layers.0.self_attn.q_a_proj.weight"]
    kv_piece = pieces["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"]
    assert q_piece.box == kv_piece.box == Box((start, 0), (rows_q, 5))
    assert torch.equal(q_piece.data, fused[:rows_q])
    assert torch.equal(kv_piece.data, fused[rows_q:])


def test_a_latent_projection_of_other_size_is_refused() -> None:
    q = weight(5, 5)
    at = "decoder.layers.0.self_attention."
    model = FakeModel(
        {"q": leaf(at + "linear_q_down_proj.weight", q, (0, 1, 2))}, {"q_lora_rank": 6, "kv_lora_rank": 4}, q=q
    )
    assert "10 rows, but the configuration says 6" in refusal(model, DEEPSEEK)


def test_qkv_pieces_are_views_of_live_memory_per_group() -> None:
    fused, bias = weight(16, 3), weight(16)
    at = "decoder.layers.1.self_attention.linear_qkv."
    model = FakeModel({"w": leaf(at + "weight", fused), "b": leaf(at + "bias", bias)}, w=fused, b=bias)
    exporter = export(model)
    assert {s.name.split(".", 4)[4]: s.shape for s in exporter.specs()} == {
        "q_proj.weight": (8, 3),
        "k_proj.weight": (4, 3),
        "v_proj.weight": (4, 3),
        "q_proj.bias": (8,),
        "k_proj.bias": (4,),
        "v_proj.bias": (4,),
    }
    pieces = exporter.pieces()
    assert len(pieces) == 12
    with torch.no_grad():
        fused.zero_()
        bias.fill_(7)
    for piece in pieces:
        assert piece.data.shape == piece.box.extent
        assert (piece.data == (7 if piece.name.endswith("bias") else 0)).all()


def test_a_transposed_weight_is_a_strided_view() -> None:
    stored = weight(3, 4)
    model = FakeModel({"w": leaf("x.weight", stored.t())}, w=stored)
    (piece,) = export(model, PASSTHROUGH).pieces()
    assert piece.data.data_ptr() == stored.data_ptr()
    assert torch.equal(piece.data, stored.detach().t())


def test_scalars_and_empty_tensors() -> None:
    scalar, empty = weight(), weight(0, 4)
    model = FakeModel({"s": leaf("scale", scalar), "e": leaf("none", empty)}, s=scalar, e=empty)
    exporter = export(model, PASSTHROUGH)
    assert [(s.name, s.shape) for s in exporter.specs()] == [("scale", ())]
    (piece,) = exporter.pieces()
    assert piece.box == Box((), ())
    assert piece.data.data_ptr() == scalar.data_ptr()


def test_dtypes_are_kept() -> None:
    leaves, params = {}, {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        name = "p_" + str(dtype).removeprefix("torch.")
        params[name] = torch.nn.Parameter(torch.zeros(2, 2, dtype=dtype), requires_grad=False)
        leaves[name] = leaf(name, params[name])
    found = {s.name: s.dtype for s in export(FakeModel(leaves, **params), PASSTHROUGH).specs()}
    assert found == {"p_float32": "F32", "p_bfloat16": "BF16", "p_float16": "F16", "p_float8_e4m3fn": "F8_E4M3"}
    strange = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex128))
    text = refusal(FakeModel({"c": leaf("c", strange)}, c=strange), PASSTHROUGH)
    assert "c: dtype torch.complex128 has no checkpoint form" in text


def test_vocabulary_padding_needs_the_real_size() -> None:
    embedding = weight(8, 3)
    model = FakeModel({"e": leaf("embedding.word_embeddings.weight", embedding, (0, 1, 2))}, e=embedding)
    assert "16 vocabulary rows, some of which may be padding: pass the checkpoint's vocab_size" in refusal(model)
    assert "vocab_size is 17, but the model has only 16 rows" in refusal(model, vocab_size=17)
    (piece,) = export(model, vocab_size=13).pieces()
    assert piece.box == Box((8, 0), (5, 3))
    assert export(model, vocab_size=8).pieces() == []  # this rank holds nothing but padding
    (whole,) = export(model, PASSTHROUGH).pieces()
    assert whole.box == Box((8, 0), (8, 3))


def test_case_57_every_unmapped_name_is_listed() -> None:
    params = {n: weight(2, 2) for n in ("a", "b", "c")}
    model = FakeModel(
        {
            "a": leaf("adapter.lora_a", params["a"]),
            "decoder.layers.0.extra": leaf("decoder.layers.1.extra", params["b"]),
            "norm": leaf("decoder.final_layernorm.weight", params["c"]),
        },
        **params,
    )
    text = refusal(model)
    assert "2 leaves that table 'llama' does not map" in text
    assert "adapter.lora_a (here a), decoder.layers.1.extra (here decoder.layers.0.extra)" in text
    mapped = LLAMA.extended(
        Rule("adapter.lora_a", ()), Rule("decoder.layers.{layer}.extra", ("model.layers.{layer}.extra",))
    )
    assert [s.name for s in export(model, mapped).specs()] == ["model.layers.1.extra", "model.norm.weight"]


def test_case_57_many_unmapped_names_are_listed_by_pattern() -> None:
    params = {f"w{i}": weight(1) for i in range(300)}
    model = FakeModel({n: leaf(f"decoder.layers.{i}.mixer.a", p) for i, (n, p) in enumerate(params.items())}, **params)
    text = refusal(model)
    assert "300 leaves that table 'llama' does not map" in text
    assert text.endswith("decoder.layers.{layer}.mixer.a (300 leaves)")


def test_case_83_parameters_that_no_leaf_covers_are_listed() -> None:
    norm, halved, forgotten = weight(4), weight(4, 2), weight(3)
    model = FakeModel(
        {"norm": leaf("decoder.final_layernorm.weight", norm), "half": leaf("value_head", halved[:2])},
        norm=norm,
        halved=halved,
        forgotten=forgotten,
    )
    text = refusal(model, LLAMA.extended(Rule("value_head", ("value_head",))))
    assert "halved (16 of 32 bytes): bytes that no leaf covers" in text
    assert "forgotten (0 of 12 bytes): bytes that no leaf covers" in text
    assert "norm" not in text


def test_copies_are_refused_by_name() -> None:
    norm = weight(4)
    model = FakeModel({"norm": leaf("decoder.final_layernorm.weight", norm.detach().clone())}, norm=norm)
    assert "norm: its leaf is a copy, not the memory of a parameter or buffer" in refusal(model)


def test_two_copies_of_one_box_on_a_rank_are_refused() -> None:
    a, b = weight(4), weight(4)
    leaves = {"a": leaf("decoder.final_layernorm.weight", a), "b": leaf("decoder.final_layernorm.weight", b)}
    assert "b: this rank holds model.norm.weight" in refusal(FakeModel(leaves, a=a, b=b))
    # The same memory twice is one piece.
    leaves["b"] = leaf("decoder.final_layernorm.weight", a)
    assert len(export(FakeModel(leaves, a=a)).pieces()) == 1


def test_leaves_that_disagree_on_a_tensor_are_refused() -> None:
    a, b = weight(4), weight(6)
    leaves = {"a": leaf("x", a), "b": leaf("y", b)}
    rules = [Rule(k, ("same",)) for k in ("x", "y")]
    assert "b: same is TensorSpec" in refusal(FakeModel(leaves, a=a, b=b), LLAMA.extended(*rules))


def test_tensor_subclasses_are_refused_by_type() -> None:
    class QuantizedTensor(torch.Tensor):
        pass

    hidden = torch.nn.Parameter(torch.zeros(4).as_subclass(QuantizedTensor))
    model = FakeModel({"q": leaf("decoder.final_layernorm.weight", hidden)}, q=hidden)
    assert "q: of type QuantizedTensor, not a plain tensor" in refusal(model)


def test_foreign_sharding_is_refused_by_name() -> None:
    norm = weight(4)

    def model(**config: Any) -> FakeModel:
        return FakeModel({"norm": leaf("decoder.final_layernorm.weight", norm)}, config, norm=norm)

    assert "gtp_weight_remat_size=2: GTP" in refusal(model(gtp_weight_remat_size=2))
    assert "expert_gtp_weight_remat_size=4" in refusal(model(expert_gtp_weight_remat_size=4))
    assert "attention_output_gate" in refusal(model(attention_output_gate=True))
    assert "moe_mlp_glu_interleave_size=32" in refusal(model(moe_mlp_glu_interleave_size=32))
    assert "decoder.final_layernorm.weight" not in refusal(model(gtp_weight_remat_size=2))
    assert "norm: holds the norm weight minus one" in refusal(model(layernorm_zero_centered_gamma=True))
    # The pass-through table keeps rows and values as Megatron has them.
    kept = export(model(layernorm_zero_centered_gamma=True, attention_output_gate=True), PASSTHROUGH)
    assert [s.name for s in kept.specs()] == ["decoder.final_layernorm.weight"]

    class TorchFullyShardedDataParallel(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

    assert "TorchFullyShardedDataParallel shards parameters" in refusal(TorchFullyShardedDataParallel(model()))
    wrapped = torch.nn.Module()
    wrapped.module = model()
    wrapped.ddp_config = SimpleNamespace(reuse_grad_buf_for_mxfp8_param_ag=True)
    assert "reuse_grad_buf_for_mxfp8_param_ag" in refusal(wrapped)
    sharded = leaf("decoder.final_layernorm.weight", norm)
    sharded.is_torch_fsdp2_param = True
    assert "norm: sharded over data parallel ranks by FSDP" in refusal(FakeModel({"norm": sharded}, norm=norm))


def test_buffers_are_volatile() -> None:
    model = FakeModel({})
    model.register_buffer("bias", torch.zeros(4))
    model.leaves = {"bias": leaf("decoder.layers.mlp.router.expert_bias", model.bias, (0, 1, 2), axes=1)}
    exporter = export(model, QWEN_MOE)
    (piece,) = exporter.pieces()
    assert (piece.name, piece.volatile) == ("model.layers.1.mlp.gate.e_score_correction_bias", True)
    assert exporter.settle() == 0.0
    assert exporter.num_open_gathers(0) == 0


def test_bad_calls() -> None:
    with pytest.raises(ValueError, match="no model chunks"):
        MegatronExporter([], LLAMA)
    with pytest.raises(ValueError, match="vocab_size must be positive, not 0"):
        MegatronExporter([FakeModel({})], LLAMA, vocab_size=0)
