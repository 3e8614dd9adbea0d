"""The demo's training in one process: its model, optimizer, warm-up, task and policy gradient, step by step, and its exports.

Everything is launch/demo's own; only the two processes are one, so samples are handed over in memory. A batch is made by
the weights one step before those that learn from it, as in the demo. Before it: launch/demo. After it: bench_deltas. Needs
megatron-core and transformers, and a machine without CUDA.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist

from launch import cpu_shim
from launch.bench.payload_cases import RUN
from launch.compose import compose
from launch.demo.sampler import build_model, checkpoint_of, generate
from launch.demo.samples import Made, Samples
from launch.demo.sorting import Sorting
from megasync.adapters.megatron import MegatronExporter
from megasync.adapters.names_hf import table
from megasync.quant.checkpoint import QuantRule
from megasync.schema import make_schema
from megasync.trainer.exporter import Exporter
from megasync.trainer.quantised import QuantisedExporter
from megasync.trainer.snapshot import words_of
from megasync.types import WORD_DTYPES

NVFP4_RULES = (QuantRule("*_proj.weight", "nvfp4/modelopt-1d@1"),)
"""All projections, experts included; embeddings, head, norms and router stay BF16, as in public NVFP4 checkpoints."""


class Export:
    """The canonical bytes of the live weights, of one format.

    Args:
        exporter: Of whole tensors: this process holds everything.

    Attributes:
        schema: The tensors.
    """

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self.schema = make_schema(RUN, exporter.specs())
        boxes = [(p.name, p.box) for p in exporter.pieces()]
        self._pieces = exporter.own(boxes, self.schema.tensors)

    def state(self) -> list[np.ndarray]:
        """A copy of the words of every tensor as they are now, in its shape, in id order."""
        self._exporter.settle()
        found = [np.empty(t.shape, WORD_DTYPES[t.word_nbytes]) for t in self.schema.tensors]
        for piece in self._pieces:
            at = tuple(slice(a, a + n) for a, n in zip(piece.box.start, piece.box.extent, strict=True))
            whole = found[self.schema.ids[piece.name]]
            whole[at] = words_of(piece.data).reshape(piece.box.extent)
        return found


class Training:
    """A run of the demo's training. Made by ``training``.

    Args:
        overrides: Of the demo's configuration; the layout is one rank.

    Attributes:
        bf16: The BF16 export.
        nvfp4: The NVFP4 export of the same weights.
        reward: Mean reward of the batch that the last step learned from.
    """

    def __init__(self, overrides: Sequence[str]) -> None:
        # Megatron is imported here, behind the shim.
        from launch.demo.bf16 import Bf16Exporter
        from launch.demo.learner import build_run, share_of, warm_up

        self._settings = compose(["parallel=single", *overrides])
        self._share_of, self._task = share_of, Sorting(self._settings.demo.digits)
        self._run, self._optimizer = build_run(self._settings)
        warm_up(self._settings, self._run, self._optimizer, self._task)
        m = self._settings.model
        plain = Bf16Exporter(MegatronExporter(self._run.chunks, table(m.table), vocab_size=m.vocab_size))
        self.bf16 = Export(plain)
        self.nvfp4 = Export(QuantisedExporter(plain, NVFP4_RULES))
        self._engine = build_model(m)
        self._num_batches = 0
        self._batch = self._sample()
        self.reward = self._batch.made.reward

    def steps(self, num: int, lr: float) -> Iterator[None]:
        """Train.

        Args:
            num: Steps.
            lr: Learning rate of all of them.

        Yields:
            After every step.
        """
        self._optimizer.set_lr(lr)
        for _ in range(num):
            batch, self._batch = self._batch, self._sample()
            self._run.train_step(*self._share_of(self._settings, self._task, batch))
            self.reward = batch.made.reward
            yield

    def close(self) -> None:
        """Forget the model."""
        self._run.destroy()

    def _sample(self) -> Samples:
        """A batch by the weights as they are."""
        d = self._settings.demo
        live = checkpoint_of(self._engine)
        for spec, words in zip(self.bf16.schema.tensors, self.bf16.state(), strict=True):
            live[spec.name].copy_(torch.from_numpy(words.view(np.int16)).view(torch.bfloat16))
        generator = torch.Generator().manual_seed(d.seed + self._num_batches)
        self._num_batches += 1
        prompts = self._task.prompts(d.num_prompts, generator).repeat_interleave(d.num_samples, dim=0)
        tokens = generate(self._engine, prompts, d.digits, generator)
        rewards = self._task.rewards(tokens)
        return Samples(tokens, rewards, Made(self._num_batches, float(rewards.mean()), "", 0.0, 0, 0.0))


@contextmanager
def training(overrides: Sequence[str]) -> Iterator[Training]:
    """Build and warm up a run, in a process group of this process alone.

    Args:
        overrides: Of the demo's configuration, such as ``model=tiny_moe``.
    """
    warnings.filterwarnings("ignore")  # Megatron tells at length which CUDA extensions are absent
    logging.getLogger("megatron").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    cpu_shim.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        found = Training(overrides)
        yield found
        found.close()
    finally:
        dist.destroy_process_group()
