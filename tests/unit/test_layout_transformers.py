"""The probe on a real loader: transformers 5 stacks and fuses the experts of a checkpoint while it loads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from megasync.layout import ProbedPlan, probe
from megasync.layout.probe_patterns import random_tensor

transformers = pytest.importorskip("transformers", reason="needs the hf extra: pip install 'megasync[hf]'")

BF16 = torch.bfloat16
EXPERTS, INNER, HIDDEN = 4, 16, 32


def config(tied: bool) -> Any:
    return transformers.Qwen3MoeConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=48,
        intermediate_size=HIDDEN,
        moe_intermediate_size=INNER,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=tied,
    )


def specs(tied: bool) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The checkpoint's names, one matrix per expert."""
    layer = "model.layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (48, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        f"{layer}input_layernorm.weight": (HIDDEN,),
        f"{layer}post_attention_layernorm.weight": (HIDDEN,),
        f"{layer}self_attn.q_proj.weight": (32, HIDDEN),
        f"{layer}self_attn.k_proj.weight": (16, HIDDEN),
        f"{layer}self_attn.v_proj.weight": (16, HIDDEN),
        f"{layer}self_attn.o_proj.weight": (HIDDEN, 32),
        f"{layer}self_attn.q_norm.weight": (8,),
        f"{layer}self_attn.k_norm.weight": (8,),
        f"{layer}mlp.gate.weight": (EXPERTS, HIDDEN),
    }
    for e in range(EXPERTS):
        shapes[f"{layer}mlp.experts.{e}.gate_proj.weight"] = (INNER, HIDDEN)
        shapes[f"{layer}mlp.experts.{e}.up_proj.weight"] = (INNER, HIDDEN)
        shapes[f"{layer}mlp.experts.{e}.down_proj.weight"] = (HIDDEN, INNER)
    if not tied:
        shapes["lm_head.weight"] = (48, HIDDEN)
    return {n: (s, BF16) for n, s in shapes.items()}


def model_of(weights: Mapping[str, torch.Tensor], tied: bool) -> Any:
    transformers.utils.logging.disable_progress_bar()
    cls = transformers.Qwen3MoeForCausalLM
    return cls.from_pretrained(None, config=config(tied), state_dict=dict(weights), dtype=BF16).eval()


def live_of(model: Any) -> dict[str, torch.Tensor]:
    return {n: t.data for n, t in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]}


def probed(tied: bool) -> ProbedPlan:
    return probe(lambda w: live_of(model_of(w, tied)), specs(tied), num_draws=1)


@pytest.fixture(scope="module")
def plan() -> ProbedPlan:
    return probed(tied=False)


def test_every_checkpoint_tensor_is_found(plan: ProbedPlan) -> None:
    assert plan.unmapped == {}
    assert plan.derived == {}
    stack = "model.layers.0.mlp.experts.gate_up_proj"
    for e in range(EXPERTS):
        for at, part in enumerate(("gate", "up")):
            (record,) = plan.layouts[f"model.layers.0.mlp.experts.{e}.{part}_proj.weight"].records
            assert (record.storage, record.base) == (stack, (2 * e + at) * INNER * HIDDEN)


def test_case_47_masks_in_checkpoint_names_make_the_model_of_the_new_checkpoint(plan: ProbedPlan) -> None:
    rng = np.random.default_rng(1)
    old = {n: random_tensor(*s, rng, finite=True) for n, s in specs(False).items()}
    new = {n: t.clone() for n, t in old.items()}
    generator = torch.Generator().manual_seed(2)
    for t in new.values():
        t.copy_(torch.randn(t.shape, generator=generator) * 0.1)
    warm, cold = model_of({n: t.clone() for n, t in old.items()}, False), model_of(new, False)
    masks = {n: old[n].view(torch.int16) ^ new[n].view(torch.int16) for n in old}
    plan.xor_(live_of(warm), masks)
    for name, tensor in plan.gather(live_of(warm)).items():
        assert torch.equal(tensor.view(torch.int16), new[name].view(torch.int16)), name
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(warm(ids).logits, cold(ids).logits)


def test_case_82_tied_embeddings_are_one_storage() -> None:
    tied = probed(tied=True)
    assert tied.unmapped == {}
    (record,) = tied.layouts["model.embed_tokens.weight"].records
    model = model_of({n: torch.zeros(s, dtype=d) for n, (s, d) in specs(True).items()}, True)
    tied.xor_(live_of(model), {"model.embed_tokens.weight": torch.full((48, HIDDEN), 5, dtype=torch.int16)})
    assert (model.lm_head.weight.data.view(torch.int16) == 5).all()
    assert record.primary
