"""Parts of launch/gpu_megatron.py that need no Megatron: digests of either side, the engine's names, the slim trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from launch.gpu_follower import SHA_EVERY, digest_of, llama_shapes, module_of, notes
from launch.gpu_trace import write_trace

SIZES = {
    "num_layers": 2,
    "hidden_size": 8,
    "ffn_hidden_size": 12,
    "num_heads": 4,
    "num_groups": 2,
    "head_dim": 4,
    "vocab_size": 6,
}


def test_a_digest_changes_with_any_word_place_name_and_shape() -> None:
    torch.manual_seed(0)
    words = torch.randn(4, 64).bfloat16()
    seen = {digest_of({"a": words})}
    for index in range(words.numel()):
        other = words.clone()
        other.view(torch.int16).view(-1)[index] ^= 1
        seen.add(digest_of({"a": other}))
    seen |= {digest_of({"b": words}), digest_of({"a": words.view(64, 4)}), digest_of({"a": words.flip(0)})}
    assert len(seen) == 1 + words.numel() + 3
    assert digest_of({"a": words.clone()}) in seen


def test_a_digest_of_several_chunks_is_that_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    words = torch.arange(1000, dtype=torch.int32)
    whole = digest_of({"a": words})
    monkeypatch.setattr("launch.gpu_follower._CHUNK_WORDS", 7)
    assert digest_of({"a": words}) == whole


def test_the_engine_has_the_shapes_of_a_llama_checkpoint() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        vocab_size=6,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    shapes = llama_shapes(SIZES)
    assert shapes == {n: tuple(p.shape) for n, p in model.named_parameters()}
    module = module_of(shapes, torch.device("cpu"), torch.bfloat16)
    assert {n: tuple(p.shape) for n, p in module.named_parameters()} == shapes


def test_some_versions_and_the_last_are_hashed_on_the_host_too() -> None:
    tensors = {"a": torch.ones(4)}
    assert "sha256" not in notes(SHA_EVERY + 1, tensors)
    assert notes(SHA_EVERY, tensors)["sha256"] == notes(3, tensors, last=True)["sha256"]


def test_a_trace_keeps_what_ran_on_the_device_and_nothing_of_the_host(tmp_path: Path) -> None:
    kernel = {"ph": "X", "cat": "kernel", "name": "k" * 200, "pid": 0, "tid": 7, "ts": 1.0, "dur": 2.0}
    events = [
        kernel | {"args": {"stream": 7, "device": 0}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": 0.5, "dur": 0.1},
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}},
    ]

    class Profile:
        def export_chrome_trace(self, path: str) -> None:
            Path(path).write_text(json.dumps({"schemaVersion": 1, "traceEvents": events, "hostname": "x"}))

    write_trace(Profile(), tmp_path / "t.json.gz")
    trace = json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))
    assert trace == {
        "schemaVersion": 1,
        "traceEvents": [kernel | {"name": "k" * 80, "args": {"stream": 7}}, events[2]],
    }
