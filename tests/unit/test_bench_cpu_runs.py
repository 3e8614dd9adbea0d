"""The CPU benchmarks at toy sizes, through the real publisher and applier: they check their own results as they go."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from launch.bench import bench_cpu, bench_payload, payload_cases
from launch.bench.bench_payload import PEER, PayloadBench
from launch.bench.host_rank import LAYER, is_weight, share
from launch.bench.masks import KINDS
from launch.bench.rows import RowWriter, read_rows
from launch.bench.workload import Shape, model_specs
from megasync.versions.changes import cut_frames, mask_frame

TINY = Shape(1, 0, 2, hidden=256, inner=128, heads=1, q_rank=64, kv_rank=64, vocabulary=64)


def test_both_ends_of_a_small_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_cpu, "share", lambda nbytes: TINY)
    path = bench_cpu.run(bench_cpu.CpuBench(0, [0.001, 0.01], repeats=2, out=str(tmp_path)))
    rows = read_rows(path)
    assert path.name == "cpu.jsonl"
    cases = Counter((r["case"], r["density"]) for r in rows)
    assert cases == {(c, d): 2 for c in ("encode", "decode", "apply") for d in (0.001, 0.01)} | {
        ("compare", 0.0): 1,
        ("join", 0.0): 1,
        ("copy", 0.0): 1,
    }
    for r in rows:
        if r["case"] in ("encode", "apply"):
            assert r["changed"] == pytest.approx(r["density"] * r["nbytes_in"], rel=0.2)
            assert 0 < r["nbytes_out"] < 3 * r["changed"] + 100_000
    assert "encode 0.100%" in capsys.readouterr().out


def test_payloads_of_small_masks_and_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = PayloadBench(4 << 20, 2 << 20, [0.2], 0.003, [0.001], str(tmp_path))
    rows = read_rows(bench_payload.run(config))
    by_case = {(r["case"], r["codec"]): r for r in rows}
    assert {r["case"] for r in rows if r.get("target")} == {
        "A article 0.085%",
        "B uniform 0.085%",
        "C bf16 0.170%",
        "D fp4 0.170%",
        "list-article 0.100%",
        "list-steps 0.100%",
    }
    for (case, codec), r in by_case.items():
        assert r["nbytes_out"] == r.get("payload_nbytes", r["nbytes_out"]) + r.get("manifest_nbytes", 0)
        assert r["over_bound_ratio"] == pytest.approx(r["nbytes_out"] / r["bound_nbytes"], rel=1e-3)
        if codec == "sparse" and not case.startswith("real "):  # of a small model: metadata weighs more
            assert 0.6 < r["payload_nbytes"] / r["bound_nbytes"] < 1.2, case
            assert r["nbytes_out"] < by_case[case, PEER]["nbytes_out"]
    assert "lz4+zstd" in capsys.readouterr().out


def test_what_is_read_back_wrong_is_an_error(tmp_path: Path) -> None:
    case = payload_cases.mask_case(KINDS["uniform"], 2 << 20)
    frames = [mask_frame(case.schema, t) for t in cut_frames(case.schema, case.tiles())]
    delta = bench_payload.encode(frames, "sparse")
    frames[0].entries.values[0] ^= 1
    with pytest.raises(RuntimeError, match="sparse: what was read back is not what was encoded"):
        bench_payload.published_nbytes(case.schema, delta, "sparse", frames)
    with RowWriter(tmp_path / "x.jsonl", "payload") as out:
        bench_payload.measure(case, out)  # a case draws the same words again
    assert len({r["num_changed"] for r in out.rows}) == 1


def test_a_share_is_made_of_whole_layers_and_scales_stay() -> None:
    one = sum(t.nbytes for t in model_specs(LAYER) if t.layer == 0)
    assert share(3 * one).num_layers == 3
    assert share(one // 4).num_experts == 8
    names = [t.name for t in model_specs(share(one // 4)) if not is_weight(t)]
    assert names
    assert all("scale" in n or n.endswith("mlp.gate.weight") for n in names)
