"""What the Megatron exporter guards against, each shown first without the guard: stale, unused, moved parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.harness import run_ranks
from tests.distributed.megatron_cases import copy_parts, preload_megatron, quiet_megatron

preload_megatron()


def _differing(exporter: Any) -> set[tuple[int, str]]:
    """Chunk and name of pieces whose bytes differ from those of some other rank that holds the same box."""
    mine = {(p.chunk, p.name, p.box): p.data for p in copy_parts(exporter)}
    everyone: list[dict] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    found = set()
    for (chunk, name, box), data in mine.items():
        for other in everyone:
            if (chunk, name, box) in other and not torch.equal(other[chunk, name, box], data):
                found.add((chunk, name))
    return found


def _stale_until_settled(rank: int, world_size: int, layout: dict, chunks: int) -> None:
    quiet_megatron()
    from launch.megatron_model import build
    from launch.megatron_setup import Layout, TinyModel, Training
    from megasync.adapters.megatron import MegatronExporter
    from megasync.adapters.names_hf import LLAMA

    run = build(TinyModel(), Layout(**layout), Training(overlap=True, bf16=True))
    exporter = MegatronExporter(run.chunks, LLAMA, vocab_size=90)
    for _ in range(2):
        run.train_step()
        stale = _differing(exporter)
        # Without the guard most tensors of every chunk are old on one of the two ranks that share them.
        assert {chunk for chunk, _ in stale} == set(range(chunks))
        assert all(exporter.num_open_gathers(c) > 0 for c in range(chunks))
        assert exporter.settle() > 0
        assert not _differing(exporter)
        assert all(exporter.num_open_gathers(c) == 0 for c in range(chunks))
    exporter.check_alive()


def test_overlapped_gather_is_stale_until_settled(tmp_path: Path) -> None:
    run_ranks(_stale_until_settled, 2, tmp_path, {}, 1)


def test_settle_covers_every_virtual_chunk(tmp_path: Path) -> None:
    run_ranks(_stale_until_settled, 4, tmp_path, {"pp": 2, "chunks": 2}, 2)


def _settling_leaves_training_alone(rank: int, world_size: int) -> list[list[float | None]]:
    quiet_megatron()
    from launch.megatron_model import build
    from launch.megatron_setup import Layout, TinyModel, Training
    from megasync.adapters.megatron import MegatronExporter
    from megasync.adapters.names_hf import LLAMA

    losses = []
    for settle in (False, True):
        run = build(TinyModel(), Layout(), Training(overlap=True))
        exporter = MegatronExporter(run.chunks, LLAMA, vocab_size=90)
        losses.append([])
        for _ in range(3):
            losses[-1].append(run.train_step())
            if settle:
                exporter.settle()
        run.destroy()
    return losses


def test_settling_does_not_change_training(tmp_path: Path) -> None:
    for without, with_settle in run_ranks(_settling_leaves_training_alone, 2, tmp_path):
        assert without == with_settle
        assert len(set(without)) == 3


def _unused_module(rank: int, world_size: int) -> None:
    quiet_megatron()
    from launch.megatron_model import build
    from launch.megatron_setup import Layout, TinyModel, Training
    from megasync.adapters.megatron import MegatronExporter
    from megasync.adapters.names import Rule
    from megasync.adapters.names_hf import LLAMA
    from tests.distributed.megatron_cases import TOKENS

    def add(gpt: torch.nn.Module) -> None:
        spare = torch.nn.Linear(128, 64, bias=False)
        gpt.add_module("spare", spare)
        # First in module order, so that no other bucket's gather starts its own.
        rest = [(n, m) for n, m in gpt._modules.items() if n != "spare"]
        for name, _ in rest:
            del gpt._modules[name]
        gpt._modules.update(rest)

    # The vocabulary fills a bucket, so the spare weight has one of its own; decay changes it although nothing uses it.
    run = build(TinyModel(vocab_size=144), Layout(), Training(overlap=True, weight_decay=0.5), amend=add)
    table = LLAMA.extended(Rule("spare.weight", ("spare.weight",)))
    exporter = MegatronExporter(run.chunks, table, vocab_size=144)
    run.train_step()
    run.logits(TOKENS)  # a forward pass gathers what it uses, and only that
    assert _differing(exporter) == {(0, "spare.weight")}
    assert exporter.num_open_gathers(0) == 1
    exporter.settle()
    assert not _differing(exporter)
    assert exporter.num_open_gathers(0) == 0


def test_settle_covers_parameters_that_no_forward_pass_uses(tmp_path: Path) -> None:
    run_ranks(_unused_module, 2, tmp_path)


def _views_are_live(rank: int, world_size: int) -> dict[str, bool]:
    quiet_megatron()
    from launch.megatron_model import build
    from launch.megatron_setup import Layout, TinyModel, Training
    from megasync.adapters.megatron import MegatronExporter
    from megasync.adapters.names_hf import GLM_MOE
    from megasync.errors import PlanError

    model = TinyModel(num_layers=2, num_experts=4, expert_bias=True, shared_ffn_hidden_size=16)
    run = build(model, Layout(ep=2), Training(bf16=True))
    exporter = MegatronExporter(run.chunks, GLM_MOE, vocab_size=model.vocab_size)
    pieces = exporter.pieces()
    before = [p.data.clone() for p in pieces]
    run.train_step()
    exporter.check_alive()
    changed: dict[str, bool] = {}
    for piece, old in zip(pieces, before, strict=True):
        changed[piece.name] = changed.get(piece.name, False) or not torch.equal(piece.data, old)
    optimized = {n for n, _ in run.chunks[0].named_parameters()}
    assert not any("expert_bias" in n for n in optimized)

    router = next(m for n, m in run.chunks[0].named_modules() if n.endswith("mlp.router"))
    kept = router.expert_bias
    router.expert_bias = kept.clone()
    with pytest.raises(PlanError, match=r"1 live tensors moved .*layers\.0\.mlp\.router\.expert_bias of chunk 0 \(new"):
        exporter.check_alive()
    router.expert_bias = kept
    exporter.check_alive()
    norm = next(m for n, m in run.chunks[0].named_modules() if n.endswith("final_layernorm"))
    norm.weight.data = norm.weight.data.clone()
    with pytest.raises(PlanError, match=r"decoder\.final_layernorm\.weight of chunk 0"):
        exporter.check_alive()
    return changed


def test_views_follow_training_and_moved_memory_is_found(tmp_path: Path) -> None:
    for changed in run_ranks(_views_are_live, 2, tmp_path):
        # Also the expert bias, which the optimizer does not know.
        assert all(changed[f"model.layers.{i}.mlp.gate.e_score_correction_bias"] for i in range(2))
        assert sum(changed.values()) > 0.9 * len(changed)
