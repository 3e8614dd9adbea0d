"""The engine side of the demo: a live Hugging Face model, and how samples are drawn from it.

The live weights are BF16 and only the applier writes them. The arithmetic is FP32 on their values, since BF16 arithmetic
is several times slower on most CPUs. Used by launch/rollout.py. Must not import Megatron.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import transformers

from launch.settings import Model


def build_model(m: Model) -> Any:
    """A transformers model with random BF16 weights, to be overwritten by what is published.

    Args:
        m: Family and sizes.

    Returns:
        The model, in evaluation mode.
    """
    sizes: dict[str, Any] = {
        "vocab_size": m.vocab_size,
        "hidden_size": m.hidden_size,
        "intermediate_size": m.ffn_hidden_size,
        "num_hidden_layers": m.num_layers,
        "num_attention_heads": m.num_heads,
        "num_key_value_heads": m.num_groups,
        "head_dim": m.head_dim,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "tie_word_embeddings": m.tied,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if m.num_experts:
        sizes |= {
            "num_experts": m.num_experts,
            "num_experts_per_tok": m.top_k,
            "moe_intermediate_size": m.moe_ffn_hidden_size,
            "norm_topk_prob": True,
        }
    config = getattr(transformers, f"{m.hf}Config")(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


@torch.no_grad()
def generate(model: Any, prompts: torch.Tensor, length: int, generator: torch.Generator) -> torch.Tensor:
    """Draw answers at temperature 1.

    Args:
        model: From ``build_model``.
        prompts: int64 ``[rows, prompt]``.
        length: Tokens to draw a row.
        generator: Source of randomness.

    Returns:
        int64 ``[rows, prompt + length]``.
    """
    weights = {name: p.float() for name, p in model.named_parameters()}
    cache = transformers.DynamicCache()
    tokens, fresh = prompts, prompts
    for _ in range(length):
        output = torch.func.functional_call(model, weights, (fresh,), {"past_key_values": cache, "use_cache": True})
        fresh = output.logits[:, -1].softmax(dim=-1).multinomial(1, generator=generator)
        tokens = torch.cat([tokens, fresh], dim=1)
    return tokens


def checkpoint_of(model: Any) -> dict[str, torch.Tensor]:
    """The live weights by checkpoint name: transformers keeps experts stacked, gate above up; checkpoints do not."""
    found: dict[str, torch.Tensor] = {}
    for name, t in model.named_parameters():
        stack = re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)", name)
        if stack is None:
            found[name] = t.detach()
            continue
        for i, expert in enumerate(t.detach()):
            if stack[2] == "down_proj":
                found[f"{stack[1]}.{i}.down_proj.weight"] = expert
            else:
                gate, up = expert.chunk(2)
                found |= {f"{stack[1]}.{i}.gate_proj.weight": gate, f"{stack[1]}.{i}.up_proj.weight": up}
    return found
