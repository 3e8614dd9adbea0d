"""The main job in small: Megatron ranks train and publish, a live Hugging Face model applies and generates their samples.

The same code that launch/demo.sh starts, a few steps of it, in the layouts that the configuration offers. The ranks run
beside the rollout, which is in this process. What is proved at every version is what the demo proves: live weights against
a plain full gather.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.checks import check
from launch.compose import compose
from launch.demo.report import faults, make_report, read_rows
from launch.settings import Settings
from megasync.sinks.local import LocalSink
from megasync.versions.publication import PublicationReader
from tests.distributed.harness import run_ranks
from tests.distributed.megatron_cases import preload_megatron, quiet_megatron

preload_megatron()
pytestmark = pytest.mark.timeout(240)  # the first test of a world size runs all its layouts

LAYOUTS: dict[int, dict[str, list[str]]] = {
    2: {
        "tp2_sp": ["parallel=tp2_sp", "model=tiny_qwen3"],
        "pp2": ["parallel=pp2", "model=tiny_qwen3", "publish.every=2"],
        "pp2_vpp2": ["parallel=pp2_vpp2", "model.num_layers=4"],
        "cp2": ["parallel=cp2", "codec=auto"],
        "dp2": ["parallel=dp2", "gather=direct"],
        "ep2": ["parallel=ep2", "model=tiny_moe"],
    },
    4: {
        "tp2_dp2": ["parallel=tp2_dp2", "gather=gloo_2_writers"],
        "tp2_pp2": ["parallel=tp2_pp2", "codec=lz4+zstd"],
    },
}
_ALL = [(size, name) for size, layouts in LAYOUTS.items() for name in layouts]
Ran = Callable[[int, str], tuple[Settings, dict[str, Any]]]


def _train(rank: int, world_size: int, settings: dict[str, Settings]) -> None:
    quiet_megatron()
    from launch.train import train_all

    for s in settings.values():
        train_all(check(s, world_size))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Settings and report of a layout. All layouts of one world size run in one process group, on first use."""
    from launch.rollout import roll_all

    @cache
    def run(size: int) -> dict[str, tuple[Settings, dict[str, Any]]]:
        folder = tmp_path_factory.mktemp("demo")
        few = ["demo=smoke", "demo.patience_s=30"]
        settings = {n: compose([*few, f"out={folder / n}", *o]) for n, o in LAYOUTS[size].items()}
        for s in settings.values():
            Path(s.out).mkdir()
        with ThreadPoolExecutor(1) as pool:
            rolling = pool.submit(lambda: [roll_all(s) for s in settings.values()])
            run_ranks(_train, size, folder, settings, timeout_s=200.0)
            rolling.result()
        rows = {n: [read_rows(folder / n / f"{who}.jsonl") for who in ("trainer", "rollout")] for n in settings}
        return {n: (s, make_report(s, *rows[n])) for n, s in settings.items()}

    return lambda size, name: run(size)[name]


@pytest.mark.parametrize(("size", "name"), _ALL)
def test_every_version_is_bit_exact(size: int, name: str, ran: Ran) -> None:
    s, report = ran(size, name)
    assert report["bit_exact"], report["per_version"]
    assert faults(report, s.demo.min_rise) == []
    deltas = [v for v in report["per_version"] if v["phase"] != "start"]
    assert [v["phase"] for v in deltas] == (
        ["learn", "learn", "learn", "fine", "fine"] if s.publish.every == 1 else ["learn", "fine", "fine"]
    )
    assert report["versions"] == len(deltas) + 1
    assert all(v["payload_nbytes"] > 0 and v["pause_s"] > 0 for v in deltas)
    assert deltas[-1]["density"] < 0.1 < deltas[0]["density"]
    assert report["staleness"]["least"] >= 1


@pytest.mark.parametrize(("size", "name"), _ALL)
def test_the_run_in_the_sink_says_where_each_version_comes_from(size: int, name: str, ran: Ran) -> None:
    s, report = ran(size, name)
    reader = PublicationReader(LocalSink(s.sink.url or ""), s.run)
    newest = reader.newest()
    assert newest is not None
    chain = reader.chain(newest)
    assert [m.version for m in chain] == [v["version"] for v in report["per_version"]]
    assert [m.info["phase"] for m in chain] == [v["phase"] for v in report["per_version"]]
    assert chain[-1].info["step"] == s.demo.learn_steps + s.demo.fine_steps
    assert reader.schema(newest.schema_digest).nbytes == report["full_nbytes"]


def test_the_full_gather_has_the_bytes_of_a_model_in_one_piece(tmp_path: Path) -> None:
    """The demo's oracle itself: the gather of a sharded model is the checkpoint of the same model on one rank."""
    whole = run_ranks(_gather, 1, tmp_path, ["parallel=single"])[0]
    parts = run_ranks(_gather, 2, tmp_path, ["parallel=tp2"])
    assert parts[1] is None
    assert parts[0].keys() == whole.keys()
    for tensor, value in whole.items():
        assert torch.equal(parts[0][tensor], value), tensor


def _gather(rank: int, world_size: int, overrides: list[str]) -> dict[str, torch.Tensor] | None:
    quiet_megatron()
    from launch.demo.full_gather import FullGather
    from launch.demo.learner import build_run

    s = compose(["demo=smoke", *overrides])
    run, _ = build_run(s)
    m = s.model
    return FullGather(run.chunks, num_groups=m.num_groups, head_dim=m.head_dim, vocab_size=m.vocab_size)()
