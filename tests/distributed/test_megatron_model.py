"""The CPU shim and the tiny models: layouts that share data and weights train alike, one after the other in one group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.harness import run_ranks
from tests.distributed.megatron_cases import preload_megatron, quiet_megatron

preload_megatron()


def _losses(rank: int, world_size: int, layouts: dict[str, dict]) -> dict[str, list[float]]:
    quiet_megatron()
    from launch import cpu_shim
    from launch.megatron_model import build
    from launch.megatron_setup import Layout, TinyModel, Training

    cpu_shim.install()  # a second time: nothing happens
    found: dict[str, Any] = {}
    for name, layout in layouts.items():
        run = build(TinyModel(vocab_size=96, qk_norm=True), Layout(**layout), Training(num_microbatches=1))
        found[name] = [run.train_step() for _ in range(3)]
        run.destroy()
    return found


def test_tensor_sequence_and_context_parallel_layouts_train_alike(tmp_path: Path) -> None:
    layouts = {"tp": {"tp": 2}, "sp": {"tp": 2, "sequence_parallel": True}, "cp": {"cp": 2}}
    ranks = run_ranks(_losses, 2, tmp_path, layouts)
    # A context parallel rank has the loss of its own half of the tokens.
    mean = {n: torch.tensor([r[n] for r in ranks]).mean(dim=0) for n in layouts}
    assert mean["tp"].unique().numel() == 3
    torch.testing.assert_close(mean["sp"], mean["tp"], atol=1e-5, rtol=0)
    torch.testing.assert_close(mean["cp"], mean["tp"], atol=1e-5, rtol=0)


def _install_where_cuda_is(rank: int, world_size: int) -> str:
    import torch

    torch.cuda.is_available = lambda: True
    from launch import cpu_shim

    with pytest.raises(ValueError, match="this one has it: do not install the shim") as caught:
        cpu_shim.install()
    assert torch.cuda.current_stream.__module__.startswith("torch")
    return str(caught.value)


def test_the_shim_refuses_a_machine_with_cuda(tmp_path: Path) -> None:
    assert run_ranks(_install_where_cuda_is, 1, tmp_path, backend="")
