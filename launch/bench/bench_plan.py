"""Benchmark of the ownership plan: gathered descriptions to owned units, for a 445 GB mixture of experts on 1,024 ranks.

Timed on one core: ``merge`` (decode the descriptions of all classes and put them together; the first rank), ``encode``
(for the broadcast; the first rank), ``decode`` (every rank), ``plan`` (cells, tile expansion, balance; every rank),
``digest`` and ``owned`` (every rank). Not timed: describing, which each rank does for its own part, and the network.
Writes one JSON line a sample to ``launch/bench/results``.

    python launch/bench/bench_plan.py repeats=7
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import hydra
import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from launch.bench.entry import plain_hydra, refuse, register, settings_of
from launch.bench.moe_shapes import Layout, classes
from launch.bench.places import result_file
from launch.bench.rows import replacing
from megasync.trainer.plan import make_plan
from megasync.trainer.plan_merge import decode_merged, encode_merged, merge

T = TypeVar("T")


@dataclass
class PlanBench:
    """Configuration.

    Attributes:
        repeats: Samples a case, after one that is not counted.
        stages: Pipeline stages.
        tensor: Tensor-parallel shards.
        data: Data-parallel replicas.
        expert: Expert-parallel shards of a stage.
        out: Folder of the result file, or the file itself, which ends in ``.jsonl``.
    """

    repeats: int = 5
    stages: int = 8
    tensor: int = 2
    data: int = 64
    expert: int = 32
    out: str = str(Path(__file__).resolve().parent / "results")


def layout_of(config: PlanBench) -> Layout:
    """The ranks of the settings."""
    return Layout(config.stages, config.tensor, config.data, config.expert)


def samples(config: PlanBench) -> Iterator[dict[str, Any]]:
    """One row a sample."""
    layout = layout_of(config)
    for case, scales in (("fp4-weights", False), ("nvfp4-with-scales", True)):
        described = classes(layout, scales=scales)
        for sample in range(-1, config.repeats):
            row = {"stage": "plan", "case": case, "sample": sample, **asdict(layout), "ranks": layout.world_size}
            row |= _sample(described)
            if sample >= 0:
                yield row


def _sample(described: list[tuple[list[int], bytes]]) -> dict[str, Any]:
    seconds: dict[str, float] = {}
    load = os.getloadavg()[0]
    cpu = time.process_time()

    def timed(name: str, work: Callable[[], T]) -> T:
        start = time.perf_counter()
        out = work()
        seconds[f"{name}_s"] = time.perf_counter() - start
        return out

    schema, holdings = timed("merge", lambda: merge("bench", described))
    document = timed("encode", lambda: encode_merged(schema, holdings))
    schema, holdings = timed("decode", lambda: decode_merged(document))
    plan = timed("plan", lambda: make_plan(schema, holdings))
    timed("digest", lambda: plan.digest)
    owned = timed("owned", lambda: plan.owned(len(plan.loads) // 2))
    total, cpu = sum(seconds.values()), time.process_time() - cpu
    report = plan.report()
    owners = plan.part_owners
    sizes = schema.word_nbytes.astype(np.int64)[plan.holdings.tensor_ids[plan.parts.cells]] * plan.parts.words
    if int(sizes.sum()) != schema.nbytes or np.bincount(owners, sizes, len(plan.loads)).tolist() != plan.loads.tolist():
        raise RuntimeError("the plan does not cover the model once")
    return {
        **{k: round(v, 4) for k, v in seconds.items()},
        "total_s": round(total, 4),
        "cpu_s": round(cpu, 4),
        "load_before": round(load, 2),  # where it is above 1, others shared the core and total_s counts their time too
        "num_tensors": len(schema.tensors),
        "num_units": len(plan.owners),
        "num_classes": len(described),
        "weights_nbytes": schema.nbytes,
        "described_nbytes": sum(len(d) for _, d in described),
        "broadcast_nbytes": len(document),
        "units_of_a_rank": len(owned),
        "largest_over_optimum_ratio": round(report.over_optimum_ratio, 6),
        "largest_over_mean_ratio": round(report.over_mean_ratio, 6),
    }


def environment() -> dict[str, str]:
    """Where the samples were taken."""
    root = Path(__file__).resolve().parents[2]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    versions = {"python": platform.python_version(), "numpy": np.__version__, "msgspec": msgspec.__version__}
    return {"device": f"{cpu}, one core", "commit": commit.stdout.strip() or "none", **versions}


def run(config: PlanBench) -> Path:
    """Take all samples and write them.

    Returns:
        The result file.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    path = result_file(config.out, "plan-moe-445gb-cpu.jsonl")
    where = environment()
    with replacing(path) as out:
        for row in samples(config):
            out.write(json.dumps(row | where) + "\n")
            print(
                f"{row['case']:>18} #{row['sample']}: {row['total_s']:.2f} s ({row['cpu_s']:.2f} s of CPU), "
                f"{row['num_tensors']} tensors, {row['num_units']} units, "
                f"{row['largest_over_optimum_ratio']:.4f} x optimum"
            )
    return path


register("bench_plan", PlanBench)


@hydra.main(version_base="1.3", config_name="bench_plan", config_path=None)
def main(config: Any) -> None:
    """Entry point."""
    found = settings_of(PlanBench, config)
    if faults := layout_of(found).faults():
        refuse("; ".join(faults))
    run(found)


if __name__ == "__main__":
    plain_hydra(PlanBench, cuda=False)
    main()
