"""What a tiny Megatron model is: its sizes, its parallel layout, its training; and Megatron's configurations of them.

launch/megatron_model.py builds from these. Needs megatron-core; imports nothing of megasync.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the parallel dimensions; data parallelism takes what is left of the world.

    Attributes:
        tp: Tensor parallel ranks.
        pp: Pipeline stages.
        chunks: Model chunks per stage (virtual pipeline); 1 for none.
        cp: Context parallel ranks.
        ep: Expert parallel ranks.
        etp: Tensor parallel ranks inside an expert; gloo cannot run more than 1 with ``ep`` > 1.
        sequence_parallel: Split activations of norms along the sequence over the tensor parallel ranks.
    """

    tp: int = 1
    pp: int = 1
    chunks: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """A GPT of Llama's kind (RMSNorm, rotary, SwiGLU, grouped queries), small enough for a test.

    Attributes:
        num_layers: Decoder layers, without MTP layers.
        hidden_size: Width.
        ffn_hidden_size: Inner width of a dense MLP.
        num_heads: Query heads.
        num_groups: Key and value heads.
        head_dim: Size of a head.
        vocab_size: Real vocabulary.
        vocab_divisor: The vocabulary is padded to a multiple of this times ``tp``.
        tied: Share the embedding with the output layer.
        qk_norm: RMSNorm on query and key heads.
        qkv_bias: Bias of the fused QKV projection.
        num_experts: Routed experts; 0 for a dense model.
        moe_layers: 1 for each MoE layer, 0 for each dense one; empty when all layers are alike.
        moe_ffn_hidden_size: Inner width of an expert.
        top_k: Experts per token.
        shared_ffn_hidden_size: Inner width of the shared expert; 0 for none.
        expert_bias: Sigmoid scores with the balancing bias that is written outside the optimizer.
        num_mtp_layers: Multi-token prediction layers.
        mla: Multi-latent attention (DeepSeek) instead of grouped queries; the sizes below are only for it.
        q_lora_rank: Rank of the query projection; 0 for a plain one.
        kv_lora_rank: Rank of the key and value projection.
        rope_head_dim: Rotary part of a head; ``head_dim`` is the part without.
        rotary_base: Base of the rotary frequencies.
        init_std: Deviation of the first weights; large, so that tests see differences.
    """

    num_layers: int = 4
    hidden_size: int = 32
    ffn_hidden_size: int = 48
    num_heads: int = 4
    num_groups: int = 2
    head_dim: int = 8
    vocab_size: int = 90
    vocab_divisor: int = 8
    tied: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    num_experts: int = 0
    moe_layers: tuple[int, ...] = ()
    moe_ffn_hidden_size: int = 16
    top_k: int = 2
    shared_ffn_hidden_size: int = 0
    expert_bias: bool = False
    num_mtp_layers: int = 0
    mla: bool = False
    q_lora_rank: int = 16
    kv_lora_rank: int = 8
    rope_head_dim: int = 4
    rotary_base: int = 10_000
    init_std: float = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How the model is trained.

    Attributes:
        bf16: BF16 parameters with FP32 master weights, else FP32 throughout.
        distributed_optimizer: Shard the optimizer over the data parallel ranks.
        overlap: Overlap gradient reduction and parameter gather with compute (needs ``distributed_optimizer``).
        lr: Learning rate of Adam.
        weight_decay: Decoupled weight decay of Adam.
        seed: Seed of the weights and of synthetic tokens.
        seq_length: Tokens per sequence.
        micro_batch_size: Sequences per micro batch.
        num_microbatches: Micro batches per step and data parallel rank.
        on_gpu: Weights are made and trained on this rank's GPU, in Megatron's own buckets; the CPU shim is not installed.
    """

    bf16: bool = False
    distributed_optimizer: bool = True
    overlap: bool = False
    lr: float = 1e-2
    weight_decay: float = 0.0
    seed: int = 1234
    seq_length: int = 16
    micro_batch_size: int = 2
    num_microbatches: int = 2
    on_gpu: bool = False


def transformer_config(model: TinyModel, layout: Layout, training: Training) -> Any:
    """The Megatron configuration of a model in a layout.

    Args:
        model: The model.
        layout: The parallel layout.
        training: Dtype and place are read.

    Returns:
        A ``TransformerConfig``, or ``MLATransformerConfig`` for an MLA model.
    """
    dtype = torch.bfloat16 if training.bf16 else torch.float32
    kwargs: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_heads,
        "num_query_groups": model.num_groups,
        "kv_channels": model.head_dim,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "qk_layernorm": model.qk_norm,
        "add_bias_linear": False,
        "add_qkv_bias": model.qkv_bias,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.chunks if layout.chunks > 1 else None,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "sequence_parallel": layout.sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": training.bf16,
        "use_cpu_initialization": not training.on_gpu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "layernorm_epsilon": 1e-6,
        "init_method_std": model.init_std,
        "mtp_num_layers": model.num_mtp_layers or None,
    }
    # What exists only as a CUDA or TransformerEngine kernel.
    kwargs |= dict.fromkeys(
        (
            "bias_dropout_fusion",
            "bias_activation_fusion",
            "gradient_accumulation_fusion",
            "masked_softmax_fusion",
            "persist_layer_norm",
            "apply_rope_fusion",
        ),
        False,
    )
    if model.num_experts:
        kwargs |= {
            "num_moe_experts": model.num_experts,
            "moe_ffn_hidden_size": model.moe_ffn_hidden_size,
            "moe_router_topk": model.top_k,
            "moe_shared_expert_intermediate_size": model.shared_ffn_hidden_size or None,
            "moe_router_enable_expert_bias": model.expert_bias,
            "moe_router_score_function": "sigmoid" if model.expert_bias else "softmax",
            "moe_router_bias_update_rate": 1e-2,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            "expert_tensor_parallel_size": layout.etp,
            "moe_router_dtype": "fp32",
        }
        if model.moe_layers:
            kwargs["moe_layer_freq"] = list(model.moe_layers)
    if not model.mla:
        return TransformerConfig(**kwargs)
    kwargs |= {
        "multi_latent_attention": True,
        "q_lora_rank": model.q_lora_rank or None,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_head_dim": model.head_dim,
        "qk_pos_emb_head_dim": model.rope_head_dim,
        "v_head_dim": model.head_dim,
        "rope_type": "rope",
        "rotary_base": model.rotary_base,
    }
    return MLATransformerConfig(**kwargs)


def optimizer_config(training: Training) -> OptimizerConfig:
    """The Megatron configuration of the optimizer.

    Args:
        training: How the model is trained.

    Returns:
        Adam in the training's precision.
    """
    return OptimizerConfig(
        optimizer="adam",
        lr=training.lr,
        weight_decay=training.weight_decay,
        bf16=training.bf16,
        params_dtype=torch.bfloat16 if training.bf16 else torch.float32,
        use_distributed_optimizer=training.distributed_optimizer,
        overlap_param_gather=training.overlap,
    )
