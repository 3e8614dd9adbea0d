"""launch/gpu_megatron.py on the CPU shim, tiny: trainer and follower as real processes, every version compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TINY = [
    "num_layers=2",
    "hidden_size=64",
    "ffn_hidden_size=96",
    "num_heads=4",
    "num_groups=2",
    "head_dim=16",
    "vocab_size=96",
    "seq_length=16",
    "rows=2",
    "lr=1e-3",
    "blocks=4",
    "block_steps=1",
    "check_steps=3",
    "snapshot=HOST",
]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("layout", [["tp=2", "overlap=true"], ["overlap=true"]], ids=["tp2", "dp2"])
def test_every_version_of_the_follower_is_the_full_gather_of_the_trainer(tmp_path: Path, layout: list[str]) -> None:
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "launch.gpu_megatron", *TINY, *layout, f"folder={tmp_path / 'run'}", f"out={out}"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    versions = [r for r in rows if r["case"] == "version"]
    assert [r["version"] for r in versions] == [7, 8, 9]  # four to warm up and two blocks before them
    assert all(r["equal"] and r["num_changed"] > 0 for r in versions)
    assert "sha256" in versions[-1]
    assert [r["publishes"] for r in rows if r["case"] == "step"] == [False, True, False, True]
    table = [line for line in done.stdout.splitlines() if line.startswith("| step, publishing: ")]
    assert [line.split("|")[1].strip() for line in table] == ["step, publishing: False", "step, publishing: True"]
    assert all(float(line.split("|")[2]) > 0 for line in table)
