"""The oracle of the exporter tests: a plain full gather of raw parameters, written without megasync's tables or boxes.

Parameters are concatenated along the dimension that Megatron marked, then reshaped into checkpoint tensors with torch
operations (a different way than the adapter's row arithmetic).
"""

from __future__ import annotations

import re
from collections import defaultdict

import torch

from tests.distributed.megatron_cases import Raw


def full_checkpoint(
    raws: list[Raw], *, groups: int, head_dim: int, vocab_size: int, num_layers: int, shared: str, mla: bool
) -> dict[str, torch.Tensor]:
    """Checkpoint tensors by Hugging Face name, from the raw parameters of all ranks."""
    whole: dict[str, torch.Tensor] = {}
    for name, tensor in gather_raw(raws).items():
        for hf, value in _convert(name, tensor, groups, head_dim, vocab_size, num_layers, shared, mla).items():
            assert hf not in whole, hf
            whole[hf] = value.contiguous()
    return whole


def gather_raw(raws: list[Raw]) -> dict[str, torch.Tensor]:
    """Global Megatron tensors by unique name, from the raw parameters of all ranks, which must agree."""
    by_name: dict[str, list[Raw]] = defaultdict(list)
    for raw in raws:
        by_name[raw.name].append(raw)
    whole = {}
    for name, copies in by_name.items():
        by_rank = {raw.rank: raw.data for raw in copies}
        for raw in copies:
            if raw.dim < 0:
                assert torch.equal(raw.data, copies[0].data), f"{name} is not replicated"
            else:
                assert torch.equal(raw.data, by_rank[raw.rank]), f"replicas of {name} differ"
        dim = copies[0].dim
        if dim < 0:
            whole[name] = copies[0].data
        elif "linear_fc1" in name:
            halves = [by_rank[r].chunk(2, dim=0) for r in sorted(by_rank)]
            whole[name] = torch.cat([torch.cat([h[i] for h in halves]) for i in range(2)])
        else:
            whole[name] = torch.cat([by_rank[r] for r in sorted(by_rank)], dim=dim)
    return whole


def _convert(
    name: str, t: torch.Tensor, groups: int, head_dim: int, vocab_size: int, num_layers: int, shared: str, mla: bool
) -> dict[str, torch.Tensor]:
    if name == "embedding.word_embeddings.weight":
        return {"model.embed_tokens.weight": t[:vocab_size]}
    if name == "output_layer.weight":
        return {"lm_head.weight": t[:vocab_size]}
    if name == "decoder.final_layernorm.weight":
        return {"model.norm.weight": t}
    if "local_tokens_per_expert" in name or "inv_freq" in name:
        return {}
    found = re.fullmatch(r"(decoder|mtp)\.layers\.(\d+)\.(?:transformer_layer\.|mtp_model_layer\.)?(.*)", name)
    assert found is not None, name
    block, number, rest = found.groups()
    at = f"model.layers.{int(number) + (num_layers if block == 'mtp' else 0)}"
    if rest in ("enorm.weight", "hnorm.weight", "eh_proj.weight"):
        return {f"{at}.{rest}": t}
    if block == "mtp" and rest == "final_layernorm.weight":
        return {f"{at}.shared_head.norm.weight": t}
    if rest.startswith("self_attention.linear_qkv."):
        kind = rest.rsplit(".", 1)[1]
        grouped = t.reshape(groups, -1, head_dim, *t.shape[1:])
        num_q = grouped.shape[1] - 2
        parts = grouped[:, :num_q], grouped[:, num_q], grouped[:, num_q + 1]
        return {
            f"{at}.self_attn.{n}_proj.{kind}": p.reshape(-1, *t.shape[1:]) for n, p in zip("qkv", parts, strict=True)
        }
    simple = {
        "input_layernorm.weight": "input_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight" if mla else "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
        "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
        "self_attention.linear_q_proj.weight": "self_attn.q_proj.weight",
        "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
        "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
        "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
        "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
        "mlp.linear_fc2.weight": "mlp.down_proj.weight",
        "mlp.router.weight": "mlp.gate.weight",
        "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
        "mlp.shared_experts.linear_fc2.weight": f"mlp.{shared}.down_proj.weight",
    }
    if rest in simple:
        return {f"{at}.{simple[rest]}": t}
    expert = re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.linear_(fc[12])\.weight", rest)
    if expert is not None:
        to, layer = f"{at}.mlp.experts.{expert[1]}", expert[2]
    else:
        to = f"{at}.mlp.{shared}" if "shared_experts" in rest else f"{at}.mlp"
        assert rest.endswith("linear_fc1.weight"), name
        layer = "fc1"
    if layer == "fc2":
        return {f"{to}.down_proj.weight": t}
    gate, up = t.chunk(2, dim=0)
    return {f"{to}.gate_proj.weight": gate, f"{to}.up_proj.weight": up}
