"""Naming tables of Hugging Face model families, for the Megatron adapter.

Each family is a few rows of ``(Megatron suffix, Hugging Face suffix or suffixes, rows, cut)`` relative to a layer;
``_layer_rules`` expands them for decoder and MTP layers. Both spellings of a norm are listed: fused into the next
linear layer (TransformerEngine) and alone. Sources: the parameter names of Megatron-core 0.16 and 0.19 and of the
checkpoints. After names.py, before megatron.py; must not import torch or Megatron.
"""

from __future__ import annotations

from megasync.adapters.names import PASSTHROUGH, NameTable, Rows, Rule
from megasync.types import CutAxis

_Row = tuple[str, str | tuple[str, ...], Rows, CutAxis]

_ATTENTION: tuple[_Row, ...] = (
    ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", "plain", "row"),
    ("self_attention.linear_qkv.layer_norm_bias", "input_layernorm.bias", "plain", "row"),
    ("input_layernorm.weight", "input_layernorm.weight", "plain", "row"),
    ("input_layernorm.bias", "input_layernorm.bias", "plain", "row"),
    (
        "self_attention.linear_qkv.weight",
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        "qkv",
        "row",
    ),
    (
        "self_attention.linear_qkv.bias",
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        "qkv",
        "row",
    ),
    ("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "plain", "row"),
    ("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "plain", "row"),
    ("self_attention.linear_proj.weight", "self_attn.o_proj.weight", "plain", "last"),
    ("self_attention.linear_proj.bias", "self_attn.o_proj.bias", "plain", "row"),
)

_MLA: tuple[_Row, ...] = (
    ("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight", "plain", "row"),
    ("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight", "latent", "row"),
    ("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight", "plain", "row"),
    ("self_attention.linear_q_up_proj.layer_norm_weight", "self_attn.q_a_layernorm.weight", "plain", "row"),
    ("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight", "plain", "row"),
    ("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight", "latent", "row"),
    ("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight", "plain", "row"),
    ("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attn.kv_a_layernorm.weight", "plain", "row"),
    ("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight", "plain", "row"),
    ("self_attention.core_attention.indexer.linear_wq_b.weight", "self_attn.indexer.wq_b.weight", "plain", "row"),
    ("self_attention.core_attention.indexer.linear_wk.weight", "self_attn.indexer.wk.weight", "plain", "row"),
    ("self_attention.core_attention.indexer.k_norm.weight", "self_attn.indexer.k_norm.weight", "plain", "row"),
    ("self_attention.core_attention.indexer.k_norm.bias", "self_attn.indexer.k_norm.bias", "plain", "row"),
    (
        "self_attention.core_attention.indexer.linear_weights_proj.weight",
        "self_attn.indexer.weights_proj.weight",
        "plain",
        "row",
    ),
)

_MLP: tuple[_Row, ...] = (
    ("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight", "plain", "row"),
    ("mlp.linear_fc1.layer_norm_bias", "post_attention_layernorm.bias", "plain", "row"),
    ("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "plain", "row"),
    ("pre_mlp_layernorm.bias", "post_attention_layernorm.bias", "plain", "row"),
    ("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gated", "row"),
    ("mlp.linear_fc1.bias", ("mlp.gate_proj.bias", "mlp.up_proj.bias"), "gated", "row"),
    ("mlp.linear_fc2.weight", "mlp.down_proj.weight", "plain", "last"),
    ("mlp.linear_fc2.bias", "mlp.down_proj.bias", "plain", "row"),
)


def _moe(block: str, gate: str, up: str, down: str, shared: str) -> tuple[_Row, ...]:
    """Rows of a mixture-of-experts layer: router, routed experts, shared expert."""
    expert = f"{block}.experts.{{expert}}"
    return (
        ("mlp.router.weight", f"{block}.gate.weight", "plain", "row"),
        ("mlp.router.bias", f"{block}.gate.bias", "plain", "row"),
        ("mlp.router.expert_bias", f"{block}.gate.e_score_correction_bias", "plain", "row"),
        (
            "mlp.experts.experts.{expert}.linear_fc1.weight",
            (f"{expert}.{gate}.weight", f"{expert}.{up}.weight"),
            "gated",
            "row",
        ),
        (
            "mlp.experts.experts.{expert}.linear_fc1.bias",
            (f"{expert}.{gate}.bias", f"{expert}.{up}.bias"),
            "gated",
            "row",
        ),
        ("mlp.experts.experts.{expert}.linear_fc2.weight", f"{expert}.{down}.weight", "plain", "last"),
        ("mlp.experts.experts.{expert}.linear_fc2.bias", f"{expert}.{down}.bias", "plain", "row"),
        (
            "mlp.shared_experts.linear_fc1.weight",
            (f"{shared}.gate_proj.weight", f"{shared}.up_proj.weight"),
            "gated",
            "row",
        ),
        ("mlp.shared_experts.linear_fc2.weight", f"{shared}.down_proj.weight", "plain", "last"),
        ("mlp.shared_experts.gate_weight", f"{shared}_gate.weight", "plain", "row"),
    )


_MODEL: tuple[Rule, ...] = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab"),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Rule("decoder.final_layernorm.bias", ("model.norm.bias",)),
    Rule("output_layer.weight", ("lm_head.weight",), "vocab"),
    Rule("output_layer.bias", ("lm_head.bias",), "vocab"),
)

_MTP: tuple[Rule, ...] = (
    Rule("mtp.layers.{layer}.enorm.weight", ("model.layers.{layer}.enorm.weight",)),
    Rule("mtp.layers.{layer}.hnorm.weight", ("model.layers.{layer}.hnorm.weight",)),
    Rule("mtp.layers.{layer}.eh_proj.weight", ("model.layers.{layer}.eh_proj.weight",)),
    Rule("mtp.layers.{layer}.final_layernorm.weight", ("model.layers.{layer}.shared_head.norm.weight",)),
)


def _layer_rules(*groups: tuple[_Row, ...]) -> tuple[Rule, ...]:
    """The rows of one layer, for decoder layers and for the layer inside an MTP layer."""
    rules: list[Rule] = []
    for prefix in ("decoder.layers.{layer}.", "mtp.layers.{layer}.transformer_layer."):
        for key, names, rows, cut in (row for group in groups for row in group):
            several = (names,) if isinstance(names, str) else names
            rules.append(Rule(prefix + key, tuple(f"model.layers.{{layer}}.{n}" for n in several), rows, cut))
    return tuple(rules)


def _family(name: str, *groups: tuple[_Row, ...], mtp_copies: bool = False) -> NameTable:
    return NameTable(
        name,
        (*_MODEL, *_MTP, *_layer_rules(*groups)),
        mtp_embedding="model.layers.{layer}.embed_tokens.weight" if mtp_copies else "",
        mtp_output="model.layers.{layer}.shared_head.head.weight" if mtp_copies else "",
    )


LLAMA = _family("llama", _ATTENTION, _MLP)
"""Dense models: Llama, Mistral, Qwen2, Qwen2.5, Qwen3."""

QWEN_MOE = _family("qwen_moe", _ATTENTION, _MLP, _moe("mlp", "gate_proj", "up_proj", "down_proj", "mlp.shared_expert"))
"""Qwen2-MoE (shared expert and its gate) and Qwen3-MoE."""

MIXTRAL = _family(
    "mixtral", _ATTENTION, _MLP, _moe("block_sparse_moe", "w1", "w3", "w2", "block_sparse_moe.shared_expert")
)
"""Mixtral."""

GLM_MOE = _family(
    "glm_moe",
    _ATTENTION,
    _MLP,
    _moe("mlp", "gate_proj", "up_proj", "down_proj", "mlp.shared_experts"),
    mtp_copies=True,
)
"""GLM-4.5 and 4.6: grouped queries, shared experts, score correction bias, MTP."""

DEEPSEEK = _family(
    "deepseek",
    _ATTENTION,
    _MLA,
    _MLP,
    _moe("mlp", "gate_proj", "up_proj", "down_proj", "mlp.shared_experts"),
    mtp_copies=True,
)
"""Multi-latent attention: DeepSeek-V2 and V3, Kimi-K2, GLM-5 (with its indexer), shared experts, MTP."""

TABLES: dict[str, NameTable] = {t.name: t for t in (LLAMA, QWEN_MOE, MIXTRAL, GLM_MOE, DEEPSEEK, PASSTHROUGH)}
"""All tables by name."""


def table(name: str) -> NameTable:
    """The table of a name, as configuration gives it.

    Args:
        name: One of ``TABLES``.

    Returns:
        The table.

    Raises:
        ValueError: No such table.
    """
    if name not in TABLES:
        raise ValueError(f"no naming table {name!r}; there are: {', '.join(sorted(TABLES))}")
    return TABLES[name]
