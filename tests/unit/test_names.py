"""Naming tables: keys taken apart, families' names, aliases, own rules, the pass-through table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megasync.adapters.names import PASSTHROUGH, Key, NameTable, Rule, take_apart
from megasync.adapters.names_hf import DEEPSEEK, GLM_MOE, LLAMA, MIXTRAL, QWEN_MOE, TABLES, table


def look_up(names: NameTable, key: str, axes: tuple[int, ...] = (), num_layers: int = 61) -> tuple[str, ...]:
    apart = take_apart(key, axes)
    assert apart is not None
    target = names.find(apart, num_layers)
    assert target is not None, key
    return target.names


@given(layer=st.integers(0, 200), expert=st.integers(0, 500), fc=st.sampled_from(["linear_fc1", "linear_fc2"]))
def test_indices_in_key_and_in_leading_axes_mean_the_same(layer: int, expert: int, fc: str) -> None:
    expected = Key(f"decoder.layers.{{layer}}.mlp.experts.experts.{{expert}}.{fc}.weight", layer, expert)
    stacked = f"decoder.layers.mlp.experts.experts.{fc}.weight"
    per_layer = f"decoder.layers.{layer}.mlp.experts.experts.{fc}.weight"
    single = f"decoder.layers.{layer}.mlp.experts.experts.{expert}.{fc}.weight"
    assert take_apart(stacked, (layer, expert)) == expected
    assert take_apart(per_layer, (expert,)) == expected
    assert take_apart(single) == expected


def test_halves_of_singleton_keys() -> None:
    key = take_apart("decoder.layers.3.mlp.experts.experts.5.linear_fc1.weight_v")
    assert key == Key("decoder.layers.{layer}.mlp.experts.experts.{expert}.linear_fc1.weight", 3, 5, 1)
    target = QWEN_MOE.find(key, 4)
    assert target is not None
    assert (target.names, target.rows) == (("model.layers.3.mlp.experts.5.up_proj.weight",), "plain")
    # A half of something that is not gated is nothing a table describes.
    other = take_apart("decoder.layers.3.self_attention.linear_qkv.weight_w")
    assert other is not None
    assert LLAMA.find(other, 4) is None


def test_a_leading_axis_that_is_no_index_is_not_guessed() -> None:
    assert take_apart("decoder.final_layernorm.weight", (0,)) is None
    assert take_apart("decoder.layers.mlp.shared_experts.linear_fc2.weight", (0, 1)) is None
    assert take_apart("decoder.layers.mlp.shared_experts.linear_fc2.weight", (7,)) == Key(
        "decoder.layers.{layer}.mlp.shared_experts.linear_fc2.weight", 7
    )


def test_dense_names() -> None:
    at = "decoder.layers.7."
    assert look_up(LLAMA, at + "self_attention.linear_qkv.weight") == (
        "model.layers.7.self_attn.q_proj.weight",
        "model.layers.7.self_attn.k_proj.weight",
        "model.layers.7.self_attn.v_proj.weight",
    )
    for spelling in ("self_attention.linear_qkv.layer_norm_", "input_layernorm."):
        for kind in ("weight", "bias"):
            assert look_up(LLAMA, at + spelling + kind) == (f"model.layers.7.input_layernorm.{kind}",)
    for spelling in ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."):
        assert look_up(LLAMA, at + spelling + "weight") == ("model.layers.7.post_attention_layernorm.weight",)
    assert look_up(LLAMA, at + "mlp.linear_fc1.weight") == (
        "model.layers.7.mlp.gate_proj.weight",
        "model.layers.7.mlp.up_proj.weight",
    )
    assert look_up(LLAMA, at + "self_attention.q_layernorm.weight") == ("model.layers.7.self_attn.q_norm.weight",)
    assert look_up(LLAMA, "output_layer.weight") == ("lm_head.weight",)
    assert look_up(LLAMA, "decoder.final_layernorm.weight") == ("model.norm.weight",)


def test_mixture_of_experts_names() -> None:
    fc1, fc2 = (f"decoder.layers.1.mlp.experts.experts.9.linear_fc{i}.weight" for i in (1, 2))
    assert look_up(QWEN_MOE, fc1) == (
        "model.layers.1.mlp.experts.9.gate_proj.weight",
        "model.layers.1.mlp.experts.9.up_proj.weight",
    )
    assert look_up(MIXTRAL, fc1) == (
        "model.layers.1.block_sparse_moe.experts.9.w1.weight",
        "model.layers.1.block_sparse_moe.experts.9.w3.weight",
    )
    assert look_up(MIXTRAL, fc2) == ("model.layers.1.block_sparse_moe.experts.9.w2.weight",)
    shared = "decoder.layers.1.mlp.shared_experts.linear_fc2.weight"
    assert look_up(QWEN_MOE, shared) == ("model.layers.1.mlp.shared_expert.down_proj.weight",)
    assert look_up(GLM_MOE, shared) == ("model.layers.1.mlp.shared_experts.down_proj.weight",)
    gate = "decoder.layers.1.mlp.shared_experts.gate_weight"
    assert look_up(QWEN_MOE, gate) == ("model.layers.1.mlp.shared_expert_gate.weight",)
    for names in (GLM_MOE, DEEPSEEK):
        assert look_up(names, "decoder.layers.1.mlp.router.expert_bias") == (
            "model.layers.1.mlp.gate.e_score_correction_bias",
        )


def test_multi_latent_attention_names() -> None:
    at, to = "decoder.layers.2.self_attention.", "model.layers.2.self_attn."
    for key, name in {
        "linear_q_proj.weight": "q_proj.weight",
        "linear_q_down_proj.weight": "q_a_proj.weight",
        "linear_q_up_proj.weight": "q_b_proj.weight",
        "linear_q_up_proj.layer_norm_weight": "q_a_layernorm.weight",
        "q_layernorm.weight": "q_a_layernorm.weight",
        "linear_kv_down_proj.weight": "kv_a_proj_with_mqa.weight",
        "linear_kv_up_proj.weight": "kv_b_proj.weight",
        "linear_kv_up_proj.layer_norm_weight": "kv_a_layernorm.weight",
        "kv_layernorm.weight": "kv_a_layernorm.weight",
        "linear_proj.weight": "o_proj.weight",
        "core_attention.indexer.linear_wk.weight": "indexer.wk.weight",
    }.items():
        assert look_up(DEEPSEEK, at + key) == (to + name,)


def test_mtp_layers_follow_the_decoder() -> None:
    assert look_up(DEEPSEEK, "mtp.layers.0.eh_proj.weight") == ("model.layers.61.eh_proj.weight",)
    assert look_up(DEEPSEEK, "mtp.layers.1.final_layernorm.weight") == ("model.layers.62.shared_head.norm.weight",)
    key = take_apart("mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc2.weight", (17,))
    assert key is not None
    target = DEEPSEEK.find(key, 61)
    assert target is not None
    assert target.names == ("model.layers.61.mlp.experts.17.down_proj.weight",)
    assert (target.layer, target.cut) == (61, "last")


def test_row_parallel_projections_are_cut_along_the_last_axis() -> None:
    for names in TABLES.values():
        for rule in names.rules:
            row_parallel = rule.key.endswith(("linear_proj.weight", "linear_fc2.weight"))
            assert rule.cut == ("last" if row_parallel else "row"), rule.key


def test_no_table_gives_one_name_to_two_rows_of_a_layer() -> None:
    # Two spellings of a norm share a name, as do fused and plain query projections; no model has both.
    for names in TABLES.values():
        for rule in names.rules:
            assert len(set(rule.names)) == len(rule.names)
        others = [
            name
            for rule in names.rules
            if rule.key.startswith("decoder") and "norm" not in rule.key and "linear_q_proj" not in rule.key
            for name in rule.names
        ]
        assert len(set(others)) == len(others), names.name


def test_aliases() -> None:
    copies = ("model.layers.4.embed_tokens.weight", "model.layers.4.shared_head.head.weight")
    assert GLM_MOE.aliases(4, 1, tied=False) == {
        "model.embed_tokens.weight": copies[:1],
        "lm_head.weight": copies[1:],
    }
    assert GLM_MOE.aliases(4, 1, tied=True) == {"model.embed_tokens.weight": ("lm_head.weight", *copies)}
    assert LLAMA.aliases(4, 1, tied=True) == {"model.embed_tokens.weight": ("lm_head.weight",)}
    assert LLAMA.aliases(4, 0, tied=False) == {}
    assert PASSTHROUGH.aliases(4, 1, tied=True) == {}


def test_own_rules_win_and_a_rule_without_names_leaves_out() -> None:
    own = LLAMA.extended(
        Rule("decoder.layers.{layer}.mlp.linear_fc2.weight", ("blocks.{layer}.down",)),
        Rule("value_head.weight", ()),
        name="own",
    )
    assert look_up(own, "decoder.layers.3.mlp.linear_fc2.weight") == ("blocks.3.down",)
    assert look_up(own, "value_head.weight") == ()
    assert look_up(LLAMA, "decoder.layers.3.mlp.linear_fc2.weight") == ("model.layers.3.mlp.down_proj.weight",)
    value_head = take_apart("value_head.weight")
    assert value_head is not None
    assert LLAMA.find(value_head, 4) is None
    assert own.name == "own"


def test_pass_through_keeps_global_names() -> None:
    key = take_apart("decoder.layers.mlp.experts.experts.linear_fc2.weight", (3, 5))
    assert key is not None
    target = PASSTHROUGH.find(key, 61)
    assert target is not None
    assert target.names == ("decoder.layers.3.mlp.experts.experts.5.linear_fc2.weight",)
    assert (target.rows, target.cut, target.layer) == ("plain", "last", 3)
    assert look_up(PASSTHROUGH, "decoder.layers.3.mlp.linear_fc1.weight_v") == (
        "decoder.layers.3.mlp.linear_fc1.weight_v",
    )
    # Its MTP layers keep their own numbers.
    assert look_up(PASSTHROUGH, "mtp.layers.0.eh_proj.weight") == ("mtp.layers.0.eh_proj.weight",)


def test_bad_rules_and_names_are_refused() -> None:
    with pytest.raises(ValueError, match="qkv rows hold 3 tensors"):
        Rule("a", ("q", "k"), "qkv")
    with pytest.raises(ValueError, match="plain rows hold one tensor, 2 are named"):
        Rule("a", ("x", "y"))
    with pytest.raises(ValueError, match="no naming table 'gpt5'; there are: deepseek, glm_moe, llama"):
        table("gpt5")
    assert table("mixtral") is MIXTRAL
