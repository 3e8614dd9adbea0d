"""Megatron-core on real GPUs with megasync: bit-exact versions in another process, and steps with and without it.

A GPT of Llama's kind trains in Megatron's own parallel layout, bf16 with the distributed optimizer, snapshot in HBM, the
mask on the side stream. First blocks of steps that publish and blocks that do not, in turn, are timed. Then every step
publishes, and every version is compared: a plain full gather of the trainer's live weights against the live weights of an
engine that follows in another process (launch/gpu_follower.py), by digests that share nothing with deltas. One JSON line
a step and a version. With CUDA absent it runs on the CPU shim, with sizes to match.

    python -m launch.gpu_megatron
    torchrun --nproc-per-node 2 -m launch.gpu_megatron case=tp2 tp=2 overlap=true check_steps=20 blocks=0
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import hydra
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from launch.bench.entry import plain_hydra, refuse, register, settings_of
from launch.bench.rows import RESULTS, Row, Timed
from launch.gpu_checks import faults_of
from launch.gpu_follower import notes, start_follower
from launch.gpu_report import medians, report
from launch.gpu_trace import write_trace
from megasync.config import GatherKind, PublishConfig, SnapshotPlace
from megasync.sinks.local import LocalSink
from megasync.trainer.callback import MegasyncCallback

_WARM_STEPS = 4


@dataclass
class GpuMegatron:
    """Configuration. The defaults are a model of 1.2 billion parameters.

    Attributes:
        case: Name of the layout in the rows.
        tp: Tensor parallel ranks; data parallelism takes the rest of the world.
        overlap: Overlap gradient reduction and parameter gather.
        gather: How payloads come to the writer.
        snapshot: Where the snapshot is.
        num_layers: Layers.
        hidden_size: Width.
        ffn_hidden_size: Inner width.
        num_heads: Query heads of 128.
        num_groups: Key and value heads.
        head_dim: Size of a head.
        vocab_size: Vocabulary.
        seq_length: Tokens a sequence.
        rows: Sequences of a micro batch.
        num_microbatches: Micro batches a step and data parallel rank: several make steps as long as those of a real run.
        lr: Of Adam.
        blocks: Blocks of steps that are timed, not publishing and publishing in turn: at least 4, or 0 for none.
        block_steps: Steps of a block.
        check_steps: Steps after them that publish and compare.
        folder: Emptied; the sink and what both sides note.
        out: Folder of the result file, or the file itself, which ends in ``.jsonl``; written by rank 0.
        trace: Chrome trace of a step behind a publication, ``.json.gz``; empty for none. Needs a GPU.
    """

    case: str = "one GPU"
    tp: int = 1
    overlap: bool = False
    gather: GatherKind = GatherKind.GLOO
    snapshot: SnapshotPlace = SnapshotPlace.DEVICE
    num_layers: int = 18
    hidden_size: int = 2048
    ffn_hidden_size: int = 8192
    num_heads: int = 16
    num_groups: int = 4
    head_dim: int = 128
    vocab_size: int = 32_000
    seq_length: int = 1024
    rows: int = 8
    num_microbatches: int = 1
    lr: float = 5e-7
    blocks: int = 10
    block_steps: int = 5
    check_steps: int = 50
    folder: str = "/dev/shm/megasync-megatron"
    out: str = str(RESULTS)
    trace: str = ""


_SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_heads", "num_groups", "head_dim", "vocab_size")


def sizes_of(config: GpuMegatron) -> dict[str, int]:
    """What makes the model, on either side."""
    return {name: getattr(config, name) for name in _SIZES}


class Trainer:
    """Model, callback and plain full gather of one rank. *Collective*: every rank makes it and calls its methods."""

    def __init__(self, config: GpuMegatron, device: torch.device) -> None:
        from launch.demo.full_gather import DeviceGather
        from launch.megatron_model import build
        from launch.megatron_setup import Layout, TinyModel, Training
        from megasync.adapters.megatron import MegatronExporter
        from megasync.adapters.names_hf import table as names_of

        sizes: dict[str, Any] = {**sizes_of(config)}
        training = Training(
            bf16=True,
            overlap=config.overlap,
            lr=config.lr,
            seq_length=config.seq_length,
            micro_batch_size=config.rows,
            num_microbatches=config.num_microbatches,
            on_gpu=device.type == "cuda",
        )
        self.config, self.device = config, device
        self.run = build(TinyModel(**sizes, init_std=0.02), Layout(tp=config.tp), training)
        self.gather = DeviceGather(
            self.run.chunks,
            num_groups=config.num_groups,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
        )
        publishing = PublishConfig(
            run="gpu",
            snapshot=config.snapshot,
            gather=config.gather,
            timeout_s=120.0,
            max_first_density=1.0,
            check_memory=False,  # rented machines grow their memory on demand and tell too little
        )
        exporter = MegatronExporter(self.run.chunks, names_of("llama"), vocab_size=config.vocab_size)
        sink = LocalSink(Path(config.folder) / "sink")
        self.callback = MegasyncCallback(exporter, sink, publishing, optimizer=self.run.optimizer)
        self.before_step: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Publish version 0, and look at the weights before each step, ahead of the callback's own hook."""
        self.callback.on_train_start()
        step = self.run.optimizer.step

        def watched() -> Any:
            self.before_step()
            return step()

        self.run.optimizer.step = watched

    def timed_step(self, publishes: bool) -> Row:
        """One step, to the end of its work on the compute stream."""
        begin, cpu = time.perf_counter(), time.process_time()
        self.run.train_step()
        if publishes:
            self.callback.step_end()
        took = Timed(time.perf_counter() - begin, time.process_time() - cpu)
        times = self.callback.telemetry.drain()[0]
        return {"took": took, "publishes": publishes, **{f"{k}_s": v for k, v in times.items()}}


def timed_blocks(trainer: Trainer, config: GpuMegatron) -> Iterator[Row]:
    """Blocks of steps, publishing and not in turn. The time of a mask is that of the publication before."""
    for block in range(config.blocks):
        for step in range(config.block_steps):
            row = trainer.timed_step(block % 2 == 1)
            yield {"block": block, "step": step, **row}
    trainer.callback.flush()


def compared_versions(trainer: Trainer, config: GpuMegatron) -> dict[int, Row]:
    """Steps that all publish; what a plain full gather says of each version, by version. *Collective*.

    The weights are gathered just before the optimizer writes them again: by then the forward pass has fetched what
    ``overlap_param_gather`` left to it, and the pass that read them is behind it.
    """
    found: dict[int, Row] = {}
    published: list[int] = []
    took: list[float] = []

    def look(last: bool = False) -> None:
        if published:
            begin = time.perf_counter()
            whole = trainer.gather()
            version = published.pop()
            found[version] = notes(version, whole, last)
            with (Path(config.folder) / f"trainer-{dist.get_rank()}.jsonl").open("a") as out:
                out.write(json.dumps(found[version]) + "\n")  # a run that is cut off can still be compared
            took.append(time.perf_counter() - begin)

    trainer.before_step = look
    for _ in range(config.check_steps):
        trainer.run.train_step()
        version = trainer.callback.step_end()
        assert version is not None
        published.append(version)
    trainer.callback.flush()
    look(last=True)
    return found


def train(config: GpuMegatron, device: torch.device) -> None:
    """The whole run on one rank."""
    first = dist.get_rank() == 0
    folder = Path(config.folder)
    follower = start_follower(folder, sizes_of(config), device) if first else None
    dist.barrier()
    try:
        trainer = Trainer(config, device)
        trainer.start()
        say(f"version 0 after {trainer.callback.telemetry.drain()[0]}")
        for _ in range(_WARM_STEPS):
            trainer.timed_step(True)
        trainer.callback.flush()
        steps = list(timed_blocks(trainer, config))
        if steps:
            say(f"{len(steps)} timed steps; medians in ms: {medians(steps)}")
        if config.trace:
            traced(trainer, config.trace if first else "")
        if first:
            (folder / "go").touch()
        found = compared_versions(trainer, config)
        trainer.callback.on_train_end()
        outcomes = {o.version: asdict(o) for o in trainer.callback.outcomes}
        if first and follower is not None:
            (folder / "last.new").write_text(str(max(found)))
            (folder / "last.new").rename(folder / "last")  # whole, or not there
            if follower.wait(120):
                raise RuntimeError(f"the follower ended with {follower.returncode}")
            report(config, dist.get_world_size(), trainer.gather.nbytes, steps, found, outcomes)
    except BaseException:
        if follower is not None:
            follower.kill()
        raise
    dist.barrier()


def traced(trainer: Trainer, path: str) -> None:
    """Profile a step end and the step after it: the mask beside forward and backward."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        trainer.callback.step_end()
        trainer.run.train_step()
        trainer.callback.step_end()
    trainer.callback.flush()
    if path:
        write_trace(profiler, Path(path))


def say(text: str) -> None:
    """A line from rank 0."""
    if dist.get_rank() == 0:
        print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def main_of(config: GpuMegatron) -> None:
    """Process group, then the run."""
    warnings.filterwarnings("ignore")  # Megatron tells at length which extensions are absent
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}.items():
        os.environ.setdefault(name, value)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        from launch import cpu_shim

        device = torch.device("cpu")
        cpu_shim.install()
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    train(config, device)
    dist.destroy_process_group()


register("gpu_megatron", GpuMegatron)


@hydra.main(version_base="1.3", config_name="gpu_megatron", config_path=None)
def main(config: Any) -> None:
    """Entry point of a rank."""
    found = settings_of(GpuMegatron, config, least={"blocks": 0})
    world_size, local_rank = (
        int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
    )
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if faults := faults_of(found, world_size, local_rank, num_devices):
        refuse("; ".join(faults))
    main_of(found)


if __name__ == "__main__":
    plain_hydra(GpuMegatron, cuda=False)
    main()
