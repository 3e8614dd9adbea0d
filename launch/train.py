"""Trains with Megatron-core and publishes every step through megasync; one process a rank, started by torchrun.

    torchrun --standalone --nproc-per-node 4 launch/train.py [parallel=tp2_pp2 demo.learn_steps=50 ...]

Wants a rollout process with the same overrides beside it; launch/demo.sh starts both. The configuration is in configs/.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import hydra
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from launch import cpu_shim
from launch.checks import check
from launch.compose import CONFIGS, refuse, register, settings_of
from launch.demo.progress import Progress
from launch.settings import Settings, episodes
from megasync import open_sink


def train_all(s: Settings) -> None:
    """Every episode, one after the other. *Collective*: needs a process group of the settings' size."""
    cpu_shim.install()
    # Megatron is imported here, behind the shim and the checks: it takes seconds.
    from launch.demo.learner import train

    progress = Progress(s.demo.show_every)
    with Path(s.out, "trainer.jsonl").open("a") as out:

        def record(row: dict[str, Any]) -> None:
            out.write(json.dumps(row) + "\n")
            out.flush()
            progress.show(row)

        for episode in episodes(s):
            with open_sink(s.sink) as sink:
                train(s, episode, sink, record)


def end_with_parent() -> None:
    """Have this rank end when its torchrun is killed: torchrun gives ranks sessions of their own. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


@hydra.main(config_path=str(CONFIGS), config_name="main", version_base="1.3")
def main(config: Any) -> None:
    """Entry point of a rank."""
    end_with_parent()
    rank = int(os.environ.get("RANK", "0"))
    try:
        s = check(settings_of(config), int(os.environ.get("WORLD_SIZE", "1")))
    except ValueError as e:
        print(f"rank {rank} failed: {e}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None  # no fault of the program: a traceback would bury the line that helps
    try:
        warnings.filterwarnings("ignore")  # Megatron tells at length which CUDA extensions are absent
        if rank == 0:
            logging.basicConfig(format="%(message)s")
            logging.getLogger("megasync").setLevel(logging.INFO)
        logging.getLogger("megatron").setLevel(logging.ERROR)
        torch.set_num_threads(1)
        # Longer than the wait for samples, which only rank 0 sees.
        dist.init_process_group("gloo", timeout=timedelta(seconds=s.demo.patience_s + 30))
        train_all(s)
        dist.destroy_process_group()
    except Exception as e:
        print(f"rank {rank} failed: {type(e).__name__}: {e}", file=sys.stderr, flush=True)
        raise


if __name__ == "__main__":
    if fault := refuse(sys.argv[1:], int(os.environ.get("WORLD_SIZE", "1"))):
        print(f"rank {os.environ.get('RANK', '0')} failed: {fault}", file=sys.stderr)
        sys.exit(2)
    register()
    main()
