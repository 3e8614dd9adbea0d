"""Settings of launch/gpu_megatron.py that cannot work are refused before Megatron is imported, each with what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launch.bench.rows import Timed
from launch.gpu_checks import LEAST_BLOCKS, faults_of
from launch.gpu_megatron import GpuMegatron
from launch.gpu_report import medians
from megasync.config import GatherKind

ROOT = Path(__file__).resolve().parents[2]


def faults(
    tmp_path: Path, *, world_size: int = 1, local_rank: int = 0, num_devices: int = 0, **given: object
) -> list[str]:
    config = GpuMegatron(**{"folder": str(tmp_path / "run")} | given)  # type: ignore[arg-type]
    return faults_of(config, world_size, local_rank, num_devices)


def test_what_can_run_is_no_fault(tmp_path: Path) -> None:
    assert faults(tmp_path) == []
    assert faults(tmp_path, world_size=4, tp=2, blocks=0) == []
    assert faults(tmp_path, world_size=8, local_rank=7, num_devices=8, tp=8, gather=GatherKind.NCCL) == []  # 4 groups
    assert faults(tmp_path, num_devices=1, trace=str(tmp_path / "t.json.gz"), blocks=LEAST_BLOCKS) == []
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"tp": 2},
            "tp=2 does not divide the 1 rank(s) that were started: start a multiple of it, torchrun --nproc-per-node 2 "
            "-m launch.gpu_megatron tp=2, or give another tp",
        ),
        ({"tp": 2, "world_size": 5}, "tp=2 does not divide the 5 rank(s) that were started: "),
        ({"tp": 2, "world_size": 2, "num_heads": 7, "num_groups": 1}, "num_heads=7 is not a multiple of tp=2: "),
        (
            {"tp": 4, "world_size": 4, "num_heads": 12, "num_groups": 3},
            "num_groups=3 is neither a multiple of tp=4 nor ",
        ),
        ({"num_groups": 3}, "num_heads=16 is not a multiple of num_groups=3: change one of them"),
        ({"tp": 2, "world_size": 2, "ffn_hidden_size": 97}, "ffn_hidden_size=97 is not a multiple of tp=2: "),
        ({"head_dim": 15}, "head_dim=15: rotary positions turn pairs, so it must be even"),
        ({"trace": "x"}, "trace=x: a trace is of what runs on a GPU, and torch finds none: leave trace out"),
        ({"trace": "x", "num_devices": 1}, "trace=x: expected a file that ends in .json.gz, "),
        ({"gather": GatherKind.NCCL}, "gather=nccl needs CUDA devices, and torch finds none: take gather=gloo or "),
        ({"world_size": 2, "local_rank": 1, "num_devices": 1}, "rank 1 of this host has no GPU, there are 1: "),
        ({"folder": ""}, "folder=: an empty path: give a folder that can be written to"),
        *(({"blocks": n}, f"blocks={n}: the first block that publishes ") for n in (1, 2, 3)),
    ],
    ids=str,
)
def test_what_cannot_run_is_one_line(given: dict[str, object], said: str, tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, **given)  # type: ignore[arg-type]
    assert fault.startswith(said)
    assert len(fault.splitlines()) == 1


def test_as_few_blocks_as_are_allowed_give_both_medians() -> None:
    steps = [{"took": Timed(b + 1.0, 0.0), "publishes": b % 2 == 1, "block": b} for b in range(LEAST_BLOCKS)]
    assert [(case, ms) for case, ms, *_ in medians(steps)] == [
        ("step, publishing: False", "3000.00"),
        ("step, publishing: True", "4000.00"),
    ]
    assert len(medians(steps[:-1])) == 1


def test_without_torchrun_it_ends_with_that_line_and_status_2(tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"
    command = [
        sys.executable,
        "-m",
        "launch.gpu_megatron",
        "tp=2",
        "blocks=2",
        f"folder={tmp_path / 'f'}",
        f"out={out}",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gpu_megatron: tp=2 does not divide the 1 rank(s) that were started: ")
    assert "; blocks=2: " in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())
