"""Megatron with overlapped parameter gathers under the deferred mask stage: versions equal those of forced gathers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megasync.config import PublishConfig
from megasync.sinks.local import LocalSink
from megasync.trainer import start
from megasync.trainer.callback import MegasyncCallback
from megasync.trainer.device_snapshot import DeviceSnapshot
from megasync.versions.publication import PublicationReader
from tests.distributed.harness import run_ranks
from tests.distributed.megatron_cases import preload_megatron, quiet_megatron
from tests.gpu import trainer_cases as cases

preload_megatron()

STEPS = 4


def _both_ways(
    rank: int, world_size: int, folder: str, layout: dict[str, Any], spare: bool, deaf: bool
) -> tuple[int, int]:
    """Train twice from one seed, forced and deferred; how often each settled."""
    quiet_megatron()
    from launch.megatron_model import build
    from launch.megatron_setup import Layout, TinyModel, Training
    from megasync.adapters.megatron import MegatronExporter
    from megasync.adapters.names import Rule
    from megasync.adapters.names_hf import LLAMA

    class Counting(MegatronExporter):
        settled = 0

        def settle(self) -> float:
            self.settled += 1
            return super().settle()

        def after_forward(self, chunk: int, call: Callable[[], None]) -> Callable[[], None]:
            return super().after_forward(chunk, (lambda: None) if deaf else call)

    def add(gpt: torch.nn.Module) -> None:
        unused = torch.nn.Linear(128, 64, bias=False)
        rest = list(gpt._modules.items())
        gpt._modules.clear()
        gpt.add_module("spare", unused)  # first in module order: no other bucket's gather starts its own
        gpt._modules.update(rest)

    start.make_snapshot = lambda s, r, place, device: DeviceSnapshot(s, r, place, device)  # type: ignore[assignment]
    counts = []
    for kind in (MegasyncCallback, cases.MaskCallback):
        training = Training(overlap=True, bf16=True, weight_decay=0.5 if spare else 0.0)
        run = build(TinyModel(vocab_size=144), Layout(**layout), training, amend=add if spare else None)
        names = LLAMA.extended(Rule("spare.weight", ("spare.weight",))) if spare else LLAMA
        exporter = Counting(run.chunks, names, vocab_size=144)
        sink = LocalSink(Path(folder, kind.__name__))
        callback = kind(exporter, sink, PublishConfig(timeout_s=30, max_first_density=1), optimizer=run.optimizer)
        callback.on_train_start()
        for _ in range(STEPS):
            run.train_step()
            callback.step_end()
        callback.on_train_end()
        counts.append(exporter.settled)
        run.destroy()
    return counts[0], counts[1]


def _versions(folder: Path) -> list[tuple[Any, ...]]:
    reader = PublicationReader(LocalSink(folder), "run")
    newest = reader.newest()
    assert newest is not None
    return [
        (m.version, m.num_changed, m.touched_ids.tolist(), m.new_states.tobytes(), m.touched_olds.tobytes(), m.root)
        for m in reader.chain(newest)
    ]


@pytest.mark.parametrize(
    ("ranks", "layout", "spare", "deaf"),
    [
        (2, {}, False, False),
        (2, {}, True, False),
        (2, {}, False, True),
        (4, {"pp": 2, "chunks": 2}, False, False),
    ],
    ids=["overlap", "unused module", "chunks that never run forward", "virtual stages"],
)
def test_late_chunks_give_the_versions_of_forced_gathers(
    tmp_path: Path, ranks: int, layout: dict[str, Any], spare: bool, deaf: bool
) -> None:
    told = run_ranks(_both_ways, ranks, tmp_path, str(tmp_path), layout, spare, deaf)
    forced, deferred = _versions(tmp_path / "MegasyncCallback"), _versions(tmp_path / cases.MaskCallback.__name__)
    assert [v[0] for v in forced] == list(range(STEPS + 1))
    assert deferred == forced
    # At the start, for the first publication, and for the last step, whose forward never comes.
    assert {d for _, d in told} == {STEPS + 1 if deaf else 3}
    assert {f for f, _ in told} == {STEPS + 1}
