"""A mixture of experts of transformers whose hub checkpoint has every expert by itself: which ``base`` its trainer may name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megasync import Applier, ApplyConfig, MegasyncCallback, PublishConfig
from megasync.adapters.torch_module_hf import TransformersEngine
from megasync.adapters.torch_trainer import TensorExporter
from megasync.errors import RankFailedError
from megasync.sinks.memory import MemorySink

transformers = pytest.importorskip("transformers")
Exporting = Callable[[torch.nn.Module], TensorExporter]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        vocab_size=64,
    )
    return transformers.Qwen3MoeForCausalLM(config).bfloat16()


@pytest.fixture(scope="module")
def hub(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the hub has it: ``save_pretrained`` takes the experts apart."""
    folder = tmp_path_factory.mktemp("hub")
    model.save_pretrained(folder)
    assert "model.layers.0.mlp.experts.3.gate_proj.weight" in load_file(folder / "model.safetensors")
    return folder


def apart(model: torch.nn.Module) -> TensorExporter:
    """Views of the stacked tensors under the hub's names."""
    views: dict[str, torch.Tensor] = {}
    for name, p in model.named_parameters():
        stem, last = name.rsplit(".", 1)
        for e, one in enumerate(p.detach() if stem.endswith(".experts") else ()):
            parts = one.chunk(2) if last == "gate_up_proj" else (one,)
            for part, view in zip(("gate_proj", "up_proj") if len(parts) == 2 else (last,), parts, strict=True):
                views[f"{stem}.{e}.{part}.weight"] = view
        if not stem.endswith(".experts"):
            views[name] = p.detach()
    return TensorExporter(views)


def follow(model: torch.nn.Module, hub: Path, exporting: Exporting, base: Path | None) -> None:
    """Train in place, publish, and have a live model that was loaded from the hub's files follow."""
    trained = copy.deepcopy(model)
    sink, config = MemorySink(), PublishConfig(run="r", max_first_density=1.0)
    callback = MegasyncCallback(exporting(trained), sink, config, base=base)
    callback.on_train_start()
    for _ in range(2):
        with torch.no_grad():
            for p in trained.parameters():
                p.view(-1)[::37] *= 1.01
        callback.step_end()
    callback.on_train_end()
    live = transformers.Qwen3MoeForCausalLM.from_pretrained(hub, dtype=torch.bfloat16)
    applier = Applier(TransformersEngine(live), sink, ApplyConfig(run="r"))
    applier.join()
    applier.update()
    assert applier.version == 2
    found = dict(live.named_parameters())
    for name, p in trained.named_parameters():
        assert torch.equal(p.view(torch.int16), found[name].view(torch.int16)), name
    applier.close()


def test_without_a_base(model: torch.nn.Module, hub: Path) -> None:
    follow(model, hub, TensorExporter.of_module, None)


def test_with_a_base_of_the_stacked_names(model: torch.nn.Module, hub: Path, tmp_path: Path) -> None:
    save_file({n: p.detach().contiguous() for n, p in model.state_dict().items()}, tmp_path / "model.safetensors")
    follow(model, hub, TensorExporter.of_module, tmp_path)


def test_with_the_hub_s_checkpoint_and_views_under_its_names(model: torch.nn.Module, hub: Path) -> None:
    follow(model, hub, apart, hub)


def test_the_module_s_own_names_are_not_those_of_the_hub_s_checkpoint(model: torch.nn.Module, hub: Path) -> None:
    with pytest.raises(RankFailedError, match=r"experts\.gate_up_proj is missing"):
        follow(model, hub, TensorExporter.of_module, hub)
