"""The trainer's side of an episode: build, warm up, then learn from samples and publish every step.

Called by launch/train.py on every rank, with a process group and the CPU shim in place. What megasync needs is in
``train``: an exporter, a callback, ``on_train_start``, ``step_end`` and ``on_train_end``. The rest is the task.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from launch.demo.bf16 import Bf16Exporter, MasterWeights
from launch.demo.full_gather import FullGather, sha256_of
from launch.demo.published import still_there
from launch.demo.samples import SampleFolder, Samples
from launch.demo.sorting import Sorting, advantages
from launch.megatron_model import MegatronRun, build
from launch.megatron_setup import Layout, TinyModel, Training
from launch.settings import Episode, Model, Settings
from megasync import MegasyncCallback, MegatronExporter, Sink
from megasync.adapters.names_hf import table
from megasync.versions.publication import PublicationReader

Record = Callable[[dict[str, Any]], None]


def train(s: Settings, episode: Episode, sink: Sink, record: Record) -> None:
    """Train one episode. *Collective*: every rank of the world must call it.

    Args:
        s: Settings.
        episode: What to do.
        sink: Where to publish.
        record: Keeps a row of facts; called on rank 0 only.
    """
    run, optimizer = build_run(s)
    first = dist.get_rank() == 0
    task = Sorting(s.demo.digits)
    warm_up(s, run, optimizer, task)

    now: dict[str, str | int | float] = {"phase": "start", "step": 0}
    exporter = Bf16Exporter(MegatronExporter(run.chunks, table(s.model.table), vocab_size=s.model.vocab_size))
    callback = MegasyncCallback(exporter, sink, replace(s.publish, run=episode.run), facts=lambda: dict(now))
    callback.on_train_start()
    proof = Proof(run, s.model, episode.run, record)
    proof.of(callback.version, now)

    published = PublicationReader(sink, episode.run, s.publish.sign_key or None, s.publish.timeout_s)
    folder = SampleFolder(Path(s.out) / "samples" / episode.run, s.demo.patience_s, lambda: still_there(published))
    step = 0
    for phase in episode.phases:
        optimizer.set_lr(phase.lr)
        for _ in range(phase.steps):
            times = [time.perf_counter()]
            samples = receive(folder, step)
            times.append(time.perf_counter())
            loss = run.train_step(*share_of(s, task, samples))
            times.append(time.perf_counter())
            step += 1
            now |= {"phase": phase.name, "step": step}
            version = callback.step_end()
            times.append(time.perf_counter())
            if version is not None:
                proof.of(version, now)
            if first:
                facts = {"kind": "step", "run": episode.run, "step": step, "steps": episode.num_steps, "loss": loss}
                facts |= {"phase": phase.name, "lr": phase.lr, "version": version}
                facts |= zip(("wait_s", "train_s", "step_end_s"), (b - a for a, b in pairwise(times)), strict=True)
                record(facts | {f"sample_{name}": value for name, value in asdict(samples.made).items()})
    callback.on_train_end()
    last = callback.outcomes[-1].version
    proof.of(last, now)
    if first:
        for outcome in callback.outcomes:
            record({"kind": "outcome", "run": episode.run, **asdict(outcome)})
        folder.finish(last)
    run.destroy()


def build_run(s: Settings) -> tuple[MegatronRun, MasterWeights]:
    """Build the model and its optimizer in the settings' layout. *Collective*."""
    p, seq_length = s.parallel, padded_length(s)
    model = TinyModel(**{f.name: getattr(s.model, f.name) for f in fields(TinyModel) if hasattr(s.model, f.name)})
    layout = Layout(**{f.name: getattr(p, f.name) for f in fields(Layout)})
    training = Training(
        lr=s.demo.warmup_lr,
        seed=s.demo.seed,
        seq_length=seq_length,
        micro_batch_size=s.demo.num_rows // (p.dp * p.num_microbatches),
        num_microbatches=p.num_microbatches,
    )
    run = build(model, layout, training, timeout_s=s.demo.patience_s + 30)
    optimizer = MasterWeights(run.optimizer, [q for chunk in run.chunks for q in chunk.parameters()])
    run.optimizer = optimizer
    return run, optimizer


def warm_up(s: Settings, run: MegatronRun, optimizer: MasterWeights, task: Sorting) -> None:
    """Supervised steps, so that the first samples earn something to learn from. *Collective*."""
    optimizer.set_lr(s.demo.warmup_lr)
    seq_length, rows = padded_length(s), s.demo.num_rows // s.parallel.dp
    generator = torch.Generator().manual_seed(s.demo.seed + 7919 * parallel_state.get_data_parallel_rank())
    for _ in range(s.demo.warmup_steps):
        tokens = task.padded(task.solved(task.prompts(rows, generator)), seq_length)
        run.train_step(tokens, task.loss_weights(torch.ones(rows), seq_length))


def receive(folder: SampleFolder, number: int) -> Samples:
    """The next batch, on every rank. *Collective*: rank 0 waits for it and sends it to the others."""
    parcel: list[Any] = [folder.take(number) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(parcel, src=0)
    found: Samples = parcel[0]
    return found


def share_of(s: Settings, task: Sorting, samples: Samples) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and loss weights of this rank's data parallel replica."""
    seq_length, dp = padded_length(s), parallel_state.get_data_parallel_rank()
    gains = advantages(samples.rewards, s.demo.num_samples)
    rows = s.demo.num_rows // s.parallel.dp
    mine = slice(dp * rows, (dp + 1) * rows)
    return task.padded(samples.tokens[mine], seq_length), task.loss_weights(gains[mine], seq_length)


def padded_length(s: Settings) -> int:
    """Losses a sequence, a multiple of what context and sequence parallelism cut."""
    p = s.parallel
    unit = (2 * p.cp if p.cp > 1 else 1) * (p.tp if p.sequence_parallel else 1)
    return -(-2 * s.demo.digits // unit) * unit


class Proof:
    """Records the SHA-256 of a plain full gather, once a version. *Collective*: every rank makes it and calls it.

    Args:
        run: The model.
        m: Its settings.
        name: Run name for the records.
        record: See ``train``.
    """

    def __init__(self, run: MegatronRun, m: Model, name: str, record: Record) -> None:
        sizes = {"num_groups": m.num_groups, "head_dim": m.head_dim, "vocab_size": m.vocab_size}
        self._gather = FullGather(run.chunks, **sizes, tied=m.tied)
        self._name, self._record = name, record
        self._done: set[int] = set()

    def of(self, version: int, facts: Mapping[str, Any]) -> None:
        """Gather and record the weights of a version, which they still are, with the facts of the moment."""
        if version in self._done:
            return
        self._done.add(version)
        whole = self._gather()
        if whole is not None:
            nbytes = sum(t.nbytes for t in whole.values())
            row = {"kind": "gathered", "run": self._name, "version": version, "sha256": sha256_of(whole)}
            self._record({**row, "full_nbytes": nbytes, **facts})
