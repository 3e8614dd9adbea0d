"""transformers models as engines: the installed version's own conversions, followed by layouts, proven by content.

The oracle is a cold start: a second model loaded by transformers from a checkpoint of the new weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megasync.adapters.torch_module_hf import TransformersEngine
from megasync.config import ApplyConfig
from megasync.errors import PlanError
from megasync.receiver.applier import Applier
from megasync.sinks.memory import MemorySink
from megasync.types import TensorSpec
from tests.unit.publishing import Publisher, changed, make_schema, spec

transformers = pytest.importorskip("transformers")

DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32"}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}


def models() -> dict[str, Any]:
    t = transformers
    return {
        "llama": t.LlamaConfig(**SIZES),
        "llama-tied": t.LlamaConfig(**SIZES, tie_word_embeddings=True),
        "qwen3": t.Qwen3Config(**SIZES),
        "qwen3-moe": t.Qwen3MoeConfig(**SIZES, **MOE),
        "mixtral": t.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
        "deepseek-v3": t.DeepseekV3Config(
            **{k: v for k, v in SIZES.items() if k != "head_dim"} | {"num_key_value_heads": 4},
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
        ),
    }


def words_of(tensor: torch.Tensor) -> np.ndarray:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return raw.view(f"<u{tensor.element_size()}").reshape(tuple(tensor.shape) or (1,)).copy()


def load(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def checkpoint(folder: Path) -> tuple[list[TensorSpec], dict[str, np.ndarray]]:
    tensors = load_file(folder / "model.safetensors")
    specs = [spec(n, DTYPES[t.dtype], tuple(t.shape)) for n, t in tensors.items()]
    return specs, {n: words_of(t) for n, t in tensors.items()}


def write(folder: Path, words: dict[str, np.ndarray], like: Path) -> None:
    """A checkpoint of other weights with everything else alike."""
    old = load_file(like / "model.safetensors")
    tensors = {
        n: torch.from_numpy(words[n].view(np.uint8)).view(t.dtype).view(t.shape).contiguous() for n, t in old.items()
    }
    folder.mkdir()
    for file in like.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.arange(24)[None] % 64).logits
    return found


@pytest.mark.parametrize("name", list(models()))
def test_warm_update_equals_cold_start(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = models()[name]
    config.dtype = torch.bfloat16
    first = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    first.save_pretrained(tmp_path / "v0")
    specs, words = checkpoint(tmp_path / "v0")
    publisher = Publisher(MemorySink(), make_schema("run", specs), frame_changed=400)
    publisher.checkpoint(words)
    model = load(tmp_path / "v0")
    engine = TransformersEngine(model)
    applier = Applier(engine, publisher.sink, ApplyConfig(workers=1))
    assert applier.join().version == 0
    addresses = {n: p.data_ptr() for n, p in model.named_parameters()}
    before = logits(model)
    new = changed(words, 0.05)
    publisher.delta(new)
    applier.update()
    write(tmp_path / "v1", new, tmp_path / "v0")
    cold = load(tmp_path / "v1")
    for (n, warm), other in zip(model.state_dict().items(), cold.state_dict().values(), strict=True):
        assert torch.equal(warm, other), n
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == addresses
    assert torch.equal(logits(model), logits(cold))
    assert not torch.equal(logits(model), before)


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_model_in_single_precision_of_a_half_precision_run(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = models()[name]
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "v0")
    specs, words = checkpoint(tmp_path / "v0")
    publisher = Publisher(MemorySink(), make_schema("run", specs))
    publisher.checkpoint(words)
    model = load(tmp_path / "v0", torch.float32)
    applier = Applier(TransformersEngine(model), publisher.sink, ApplyConfig(workers=1))
    assert applier.join().version == 0
    new = changed(words, 0.05)
    publisher.delta(new)
    applier.update()
    write(tmp_path / "v1", new, tmp_path / "v0")
    cold = load(tmp_path / "v1", torch.float32)
    for (n, warm), other in zip(model.state_dict().items(), cold.state_dict().values(), strict=True):
        assert torch.equal(warm, other), n
    assert applier.audit().version == 1


def test_experts_that_the_model_does_not_have_are_listed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = models()["qwen3-moe"]
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "v0")
    specs, words = checkpoint(tmp_path / "v0")
    extra = spec("model.layers.9.mlp.experts.0.gate_proj.weight", "BF16", (24, 32))
    words[extra.name] = np.zeros((24, 32), np.uint16)
    publisher = Publisher(MemorySink(), make_schema("run", [*specs, extra]))
    publisher.checkpoint(words)
    with pytest.raises(
        PlanError, match=r"lead to no live tensor: model\.layers\.9\.mlp\.experts\.0\.gate_proj\.weight"
    ):
        Applier(TransformersEngine(load(tmp_path / "v0")), publisher.sink, ApplyConfig(workers=1)).join()
