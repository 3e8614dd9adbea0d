"""The benchmark of real deltas trains: two exports of the same weights, and rows of a few steps of the demo's own model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.distributed.harness import preload, run_ranks
from tests.distributed.megatron_cases import preload_megatron, quiet_megatron

preload_megatron()
preload("transformers")


def exports(rank: int, world_size: int) -> dict[str, Any]:
    quiet_megatron()
    from launch.bench.training import training
    from megasync.quant.formulas import formula
    from megasync.quant.nvfp4 import quantize

    with training(["demo.num_prompts=2", "demo.warmup_steps=1"]) as run:
        for _ in run.steps(2, 1e-3):
            pass
        plain = dict(zip((t.name for t in run.bf16.schema.tensors), run.bf16.state(), strict=True))
        packed = dict(zip((t.name for t in run.nvfp4.schema.tensors), run.nvfp4.state(), strict=True))
        reward = run.reward
    at = "model.layers.1.mlp"
    gate, up = (
        torch.from_numpy(plain[f"{at}.{n}_proj.weight"].view("<i2")).view(torch.bfloat16) for n in ("gate", "up")
    )
    amax = torch.maximum(gate.abs().amax(), up.abs().amax()).float()
    expected = quantize(up, amax, formula("nvfp4/modelopt-1d@1"))
    return {
        "names": (sorted(plain), sorted(packed)),
        "reward": reward,
        "codes": bool((expected.codes.numpy() == packed[f"{at}.up_proj.weight"]).all()),
        "scales": bool((expected.scales.numpy() == packed[f"{at}.up_proj.weight_scale"]).all()),
        "scale": (float(expected.global_scale), float(packed[f"{at}.up_proj.weight_scale_2"].view("<f4"))),
        "plain": all((plain[n] == packed[n]).all() for n in ("lm_head.weight", "model.norm.weight")),
    }


def test_both_exports_are_of_the_weights_that_are_trained(tmp_path: Path) -> None:
    (found,) = run_ranks(exports, 1, tmp_path, backend="")
    plain, packed = found["names"]
    assert len(plain) == 2 * 9 + 3
    assert len(packed) == len(plain) + 2 * 2 * 7
    assert 0 <= found["reward"] <= 1
    assert found["codes"]
    assert found["scales"]
    assert found["plain"]
    assert found["scale"][0] == found["scale"][1]


def measured(rank: int, world_size: int, out: str) -> None:
    quiet_megatron()
    from launch.bench.bench_deltas import DeltaBench, run

    sizes: dict[str, Any] = {"learn_steps": 1, "rates": [1e-3, 1e-5], "steps": 2, "spans": [1, 2], "samples": 2}
    run(DeltaBench(models=["demo"], keep=out, out=out, **sizes))


def test_rows_of_a_short_run(tmp_path: Path) -> None:
    from launch.bench.bench_deltas import ALL_CODECS
    from launch.bench.rows import read_rows

    run_ranks(measured, 1, tmp_path, str(tmp_path), backend="")
    rows = read_rows(tmp_path / "deltas-cpu.jsonl")
    # Two rates and exports; two deltas of one step, the second through all codecs, and one of two steps.
    assert len(rows) == 2 * 2 * (1 + len(ALL_CODECS) + 1)
    of = {(r["export"], r["lr"], r["span"], r["sample"]): r for r in rows if r["codec"] == "sparse"}
    for (export, lr, span, sample), r in of.items():
        assert 0 < r["density"] <= r["words_ratio"] * 1.0001
        assert r["nbytes_out"] == r["payload_nbytes"] + r["manifest_nbytes"]
        assert r["payload_nbytes"] > 0.5 * r["bound_nbytes"]
        assert ("scales_ratio" in r) == (export == "nvfp4")
        if export == "nvfp4":
            assert r["words_ratio"] < of["bf16", lr, span, sample]["words_ratio"]
        if lr == 1e-5:
            assert r["words_ratio"] < of[export, 1e-3, span, sample]["words_ratio"]
    assert not list(tmp_path.glob("*.npz"))  # only of the models that are kept
