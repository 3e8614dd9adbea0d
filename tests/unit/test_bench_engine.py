"""The engine benchmark at toy size on the CPU: a real decode loop, a real applier, and the checks that it makes as it goes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from launch.bench import bench_engine
from launch.bench.bench_engine import EngineBench, check_logits, check_tokens, decoding
from launch.bench.rows import RowWriter, read_rows
from launch.bench.serving import ServingRank
from launch.bench.trace import save_trace, thin
from launch.bench.workload import Shape
from megasync.telemetry import Telemetry

TINY = Shape(2, 1, 16, hidden=128, inner=128, dense_inner=256, heads=4, q_rank=64, kv_rank=64, vocabulary=512)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[ServingRank]:
    made = ServingRank(TINY, tmp_path / "sink", "cpu", tp=1, workers=1)
    yield made
    made.close()


def test_a_decoding_engine_takes_versions_between_tokens(rank: ServingRank, tmp_path: Path) -> None:
    with RowWriter(tmp_path / "engine.jsonl", "engine") as writer:
        config = EngineBench(2, 3, 10, rows=64, density=0.004)
        syncs = bench_engine.run(rank, config, writer, lambda placed: 0.001)
    assert [s.version for s in syncs] == [2, 3]
    rows = read_rows(tmp_path / "engine.jsonl")
    pauses = [r for r in rows if r["case"].startswith("P1c")]
    assert len(pauses) == 2
    for r, s in zip(pauses, syncs, strict=True):
        assert "target_id" not in r  # not the size that the target names
        assert r["value"] == pytest.approx(s.pause_s * 1e3)
        assert r["floor"] == pytest.approx(r["step_s"] * 1e3 + 1.6)
        assert s.pause_s >= s.stand_s > 0
    alone, beside = (next(r for r in rows if r["case"].startswith(f"token latency, {x}")) for x in ("no", "a sync"))
    assert (
        alone["num"] == len(alone["samples_us"]) >= 10
    )  # the loop goes on while somebody wakes who waited for the tenth
    assert beside["num"] >= 8
    assert alone["p50_s"] <= alone["p99_s"] <= alone["p99_9_s"] <= alone["max_s"]


def test_a_trace_of_work_beside_decoding(rank: ServingRank, tmp_path: Path) -> None:
    telemetry = Telemetry()

    def sync() -> None:
        with telemetry.span("apply"):
            loop.wait(2)

    with decoding(rank, 8) as loop:
        nbytes = save_trace(tmp_path / "trace.json.gz", sync, loop)
    data = (tmp_path / "trace.json.gz").read_bytes()
    assert len(data) == nbytes < 1_000_000
    found = json.loads(gzip.decompress(data))
    assert "megasync.apply" in {e["name"] for e in found["traceEvents"]}


def test_tokens_and_logits_of_other_weights_are_errors(rank: ServingRank) -> None:
    with decoding(rank, 64) as loop:
        with loop.paused():
            pass
        loop.wait(2)
        first = max(loop.around)
        with loop.paused():
            probe = loop.decoder.tokens.clone()
            before = check_logits(loop.decoder, probe)
            check_tokens(loop, first)
            rank.engine.live["lm_head.weight"].random_()
            assert not torch.equal(check_logits(loop.decoder, probe), before)
            with pytest.raises(RuntimeError, match="does not come from the live weights"):
                check_tokens(loop, first)
            loop.decoder.forward = lambda tokens: before  # type: ignore[method-assign]
            # on the CPU the step is the same forward: what was replayed is made to differ
            loop.decoder.logits_of = lambda tokens: before + 1  # type: ignore[method-assign]
            with pytest.raises(RuntimeError, match="not those of an eager forward"):
                check_logits(loop.decoder, probe)


def test_a_loop_stands_between_tokens_and_names_its_error(rank: ServingRank) -> None:
    with decoding(rank, 64) as loop:
        rank.engine.pause()
        num = len(loop.ends)
        assert loop.ends[-1] <= loop.stands_at <= rank.engine.standing_at
        rank.engine.resume(1)
        assert loop.wait(3, num) >= num + 3
        assert loop.first_after(rank.engine.resumed_at) == num
        loop.decoder.token = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
        with pytest.raises(RuntimeError, match="the decoder") as e:
            loop.wait(100_000)
        assert isinstance(e.value.__cause__, ZeroDivisionError)


def test_a_trace_keeps_the_pause_and_thins_the_rest() -> None:
    def event(name: str, ts: float, dur: float, **more: object) -> dict[str, object]:
        return {"ph": "X", "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": 7, "cat": "kernel", **more}

    tokens = [event(f"k{t}.{i}", t * 5000 + i * 10, 9) for t in range(20) for i in range(100)]
    apply = event("megasync.apply", 50_000, 1000, cat="user_annotation", tid=1)
    far = event("aten::mm", 0, 5, cat="cpu_op", tid=1)
    found = thin({"traceEvents": [*tokens, apply, far, event("copy", 3, 4, cat="gpu_memcpy", tid=8)]}, 5_000)
    names = [e["name"] for e in found["traceEvents"]]
    assert sum(n.startswith("k9.") for n in names) == sum(n.startswith("k10.") for n in names) == 100
    assert {n for n in names if n.startswith("k3.")} == {"k3.0", "k3.99"}
    assert "megasync.apply" in names
    assert "copy" in names
    assert "aten::mm" not in names
