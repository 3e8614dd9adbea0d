"""The second oracle of the exporter tests: Hugging Face's own models, loaded from a checkpoint on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from launch.megatron_setup import TinyModel


def hf_logits(
    kind: str, model: TinyModel, tensors: dict[str, torch.Tensor], folder: Path, tokens: torch.Tensor
) -> torch.Tensor:
    """Logits of a Hugging Face model that loaded the tensors; every tensor must be known and none may be missing."""
    import transformers

    config_class, model_class = getattr(transformers, f"{kind}Config"), getattr(transformers, f"{kind}ForCausalLM")
    config = config_class(**_config(kind, model))
    config.save_pretrained(folder)
    mtp = tuple(f"model.layers.{model.num_layers + i}." for i in range(model.num_mtp_layers))
    kept = {n: t.contiguous() for n, t in tensors.items() if not (mtp and n.startswith(mtp))}
    save_file(kept, str(folder / "model.safetensors"), metadata={"format": "pt"})
    loaded, info = model_class.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[problem], (problem, info[problem])
    with torch.no_grad():
        return loaded.eval()(tokens).logits


def hf_model(kind: str, model: TinyModel) -> Any:
    """A Hugging Face model of the same shape with random weights."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**_config(kind, model))
    config._attn_implementation = "eager"
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def _config(kind: str, m: TinyModel) -> dict[str, Any]:
    config: dict[str, Any] = {
        "vocab_size": m.vocab_size,
        "hidden_size": m.hidden_size,
        "intermediate_size": m.ffn_hidden_size,
        "num_hidden_layers": m.num_layers,
        "num_attention_heads": m.num_heads,
        "num_key_value_heads": m.num_groups,
        "head_dim": m.head_dim,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(m.rotary_base)},
        "tie_word_embeddings": m.tied,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    dense_first = m.moe_layers.index(1) if 1 in m.moe_layers else 0
    moe: dict[str, Any] = {
        "moe_intermediate_size": m.moe_ffn_hidden_size,
        "num_experts_per_tok": m.top_k,
        "norm_topk_prob": True,
    }
    routed: dict[str, Any] = {
        "n_routed_experts": m.num_experts,
        "n_shared_experts": 1,
        "first_k_dense_replace": dense_first if m.num_experts else m.num_layers,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
    }
    if kind == "Qwen3Moe":
        config |= moe | {"num_experts": m.num_experts, "mlp_only_layers": list(range(dense_first))}
    if kind == "Glm4Moe":
        config |= moe | routed | {"use_qk_norm": m.qk_norm}
        config["rope_parameters"]["partial_rotary_factor"] = 1.0
    if kind == "DeepseekV3":
        config |= moe | routed
        config |= {
            "num_key_value_heads": m.num_heads,
            "q_lora_rank": m.q_lora_rank or None,
            "kv_lora_rank": m.kv_lora_rank,
            "qk_nope_head_dim": m.head_dim,
            "qk_rope_head_dim": m.rope_head_dim,
            "v_head_dim": m.head_dim,
        }
        del config["head_dim"]
    return config
