"""Tiny models for vLLM's CPU engine: configurations, the names and shapes of their checkpoints, random weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megasync.layout.probe_patterns import random_tensor

HIDDEN, INNER, VOCABULARY, EXPERTS, LAYERS = 128, 256, 320, 4, 2
Specs = dict[str, tuple[tuple[int, ...], torch.dtype]]

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
)


def hf_config(kind: str, *, inner: int = 64, tied: bool = False) -> Any:
    """Llama, or Qwen3-MoE with a dense layer before a layer with experts (``moe``: ``inner`` wide), or with experts in
    every layer (``all-moe``)."""
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if kind == "llama":
        return transformers.LlamaConfig(**sizes, architectures=["LlamaForCausalLM"])
    return transformers.Qwen3MoeConfig(
        **sizes,
        moe_intermediate_size=inner,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        mlp_only_layers=[0] if kind == "moe" else [],
        architectures=["Qwen3MoeForCausalLM"],
    )


def specs(kind: str, *, inner: int = 64, tied: bool = False, dtype: torch.dtype = torch.bfloat16) -> Specs:
    """Names and shapes of the checkpoint: one matrix an expert, nothing fused."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        for name, rows in (("q", 128), ("k", 64), ("v", 64)):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (rows, HIDDEN)
        shapes[f"{at}.self_attn.o_proj.weight"] = (HIDDEN, 128)
        shapes |= {f"{at}.{n}_layernorm.weight": (HIDDEN,) for n in ("input", "post_attention")}
        if kind != "llama":
            shapes |= {f"{at}.self_attn.{n}_norm.weight": (32,) for n in ("q", "k")}
        sparse = kind == "all-moe" or (kind == "moe" and i == 1)
        if sparse:
            shapes[f"{at}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
        width = inner if sparse else INNER
        for mlp in [f"{at}.mlp.experts.{e}" for e in range(EXPERTS)] if sparse else [f"{at}.mlp"]:
            shapes |= {f"{mlp}.{n}_proj.weight": (width, HIDDEN) for n in ("gate", "up")}
            shapes[f"{mlp}.down_proj.weight"] = (HIDDEN, width)
    shapes["model.norm.weight"] = (HIDDEN,)
    if not tied:
        shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    return {n: (s, dtype) for n, s in shapes.items()}


def engine_config(folder: Path, config: Any, dtype: str = "bfloat16") -> Any:
    """vLLM's configuration of an engine for a model without a tokenizer."""
    from vllm.engine.arg_utils import EngineArgs

    config.save_pretrained(folder)
    args = EngineArgs(model=str(folder), skip_tokenizer_init=True, dtype=dtype, max_model_len=128, enforce_eager=True)
    return args.create_engine_config()


def random_weights(tensors: Specs, seed: int) -> dict[str, torch.Tensor]:
    """Random finite bytes, also values that no sum survives: for layouts."""
    rng = np.random.default_rng(seed)
    return {n: random_tensor(*s, rng, finite=True) for n, s in tensors.items()}


def model_weights(tensors: Specs, seed: int) -> dict[str, torch.Tensor]:
    """Weights that a model computes with: norms near 1, matrices large enough for outputs that differ."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, (shape, dtype) in tensors.items():
        t = torch.randn(shape, generator=generator)
        found[name] = (1 + 0.1 * t if len(shape) == 1 else 0.15 * t).to(dtype)
    return found


def masks(old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``old XOR new`` of 2-byte words."""
    return {n: old[n].view(torch.int16) ^ new[n].view(torch.int16) for n in old}


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal dtype, shape and bytes, NaN included."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))
