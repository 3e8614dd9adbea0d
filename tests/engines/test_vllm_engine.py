"""A running vLLM engine on the CPU: probed beside its live model, updated by masks, equal to an engine started cold.

Tokens and log-probabilities are compared exactly. Needs the package of vLLM for CPUs (bash launch/nightly.sh vllm).
"""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM for CPUs: bash launch/nightly.sh vllm", allow_module_level=True)

from megasync.layout import probe
from megasync.layout.conformance import check_content, check_read
from megasync.layout.live import describe, storages_of
from tests.engines import vllm_models as models

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600), pytest.mark.slow]

EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"


@contextmanager
def engine(folder: Path, weights: dict[str, torch.Tensor]) -> Iterator[Any]:
    """vLLM, in this process, started on a checkpoint."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip(f"this vLLM is for {current_platform.device_name}; this test is of the one for CPUs")
    models.hf_config("moe").save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    sizes: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "enable_prefix_caching": False}
    llm = LLM(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, **sizes)
    try:
        yield llm
    finally:
        cleanup_dist_env_and_memory()


def generated(llm: Any) -> list[tuple[list[int], list[dict[int, float]]]]:
    """Greedy tokens of three prompts, with the log-probabilities of the likeliest."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [3 + i, 7, 11 + i, 200]} for i in range(3)]
    how = SamplingParams(temperature=0, max_tokens=16, detokenize=False, logprobs=3, ignore_eos=True)
    found = []
    for result in llm.generate(prompts, how, use_tqdm=False):
        (output,) = result.outputs
        found.append((list(output.token_ids), [{k: v.logprob for k, v in at.items()} for at in output.logprobs]))
    return found


def before_and_after_masks(folder: Path, old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> tuple[Any, Any]:
    """What an engine started on the old checkpoint generates, and what it does with the masks to the new one applied.

    On the way: the content proof, the behavioural self-test, and the way back.
    """
    from megasync.adapters import vllm_probe

    tensors = models.specs("moe")
    with engine(folder, old) as llm:
        before = generated(llm)
        plan = probe(vllm_probe.loader(llm.llm_engine.vllm_config), tensors, num_draws=1)
        if plan.empty:
            pytest.skip("this CPU has vLLM keep linear layers in opaque memory")
        assert plan.unmapped == {}
        assert generated(llm) == before  # probing left the live model alone
        (live,) = llm.apply_model(vllm_probe.live_tensors)
        check_content(plan.layouts, storages_of(live, describe(live)), old)
        for name in ("lm_head.weight", "model.layers.0.self_attn.v_proj.weight", EXPERT):
            mask = {name: torch.full(tensors[name][0], 0x0041, dtype=torch.int16)}
            check_read(name, lambda m=mask: plan.xor_(live, m), lambda: repr(generated(llm)).encode())
        plan.xor_(live, models.masks(old, new))
        after = generated(llm)
        plan.xor_(live, models.masks(old, new))
        assert generated(llm) == before
    return before, after


def test_a_warm_engine_generates_what_a_cold_one_does(tmp_path: Path) -> None:
    tensors = models.specs("moe")
    old, new = models.model_weights(tensors, 1), models.model_weights(tensors, 2)
    before, after = before_and_after_masks(tmp_path / "old", old, new)
    gc.collect()  # an engine that is collected later would take the groups of the next one with it
    with engine(tmp_path / "new", new) as llm:
        cold = generated(llm)
    assert after == cold
    assert before != cold
