"""Cases that users of such systems reported, on real ranks: what Megatron leaves stale or writes late is never published.

Each case trains a few steps and publishes every one. Expected is, for every version, a plain full gather of the raw
parameters (full_gather.py), taken after the test itself forced Megatron's parameter gather; found is what a reader of its
own rebuilds from the sink alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launch.megatron_setup import TinyModel
from megasync.config import ApplyConfig, PublishConfig
from megasync.receiver.applier import Applier
from megasync.sinks.local import LocalSink
from megasync.trainer.callback import MegasyncCallback
from megasync.versions.publication import PublicationReader
from tests.distributed.full_gather import full_checkpoint
from tests.distributed.harness import run_ranks
from tests.distributed.megatron_cases import TOKENS, Raw, preload_megatron, quiet_megatron, raw_tensors
from tests.distributed.test_publish import ShardedExporter, full_model
from tests.unit.receiving import plain_engine
from tests.unit.test_publish_alone import assert_same, copy, rebuild

preload_megatron()

_OVERLAP = {"distributed_optimizer": True, "overlap": True, "bf16": True}
_BIAS = "e_score_correction_bias"


@dataclass(frozen=True)
class Late:
    """A layout, and what happens in it.

    Attributes:
        spare: Add a module that no forward pass uses and weight decay changes.
        clip: After the optimizer's step, scale the fused QKV weights down, as qk-clip does.
        skip: Steps at which the optimizer does not step.
        evaluate: Run a forward pass between the step and the step end.
    """

    table: str = "llama"
    model: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2
    spare: bool = False
    clip: bool = False
    skip: tuple[int, ...] = ()
    evaluate: bool = False
    config: dict[str, Any] = field(default_factory=dict)


CASES = {
    "overlapped gather": Late(training=_OVERLAP),
    "virtual stages": Late(layout={"pp": 2, "chunks": 2}, training=_OVERLAP, ranks=4),
    "unused module": Late(
        model={"vocab_size": 144}, training=_OVERLAP | {"weight_decay": 0.5}, spare=True, evaluate=True
    ),
    "expert bias": Late(
        "glm_moe",
        {"num_layers": 2, "num_experts": 4, "qk_norm": True, "expert_bias": True, "shared_ffn_hidden_size": 16},
        {"ep": 2},
        {"bf16": True},
    ),
    "qk-clip": Late(training=_OVERLAP, clip=True),
    "skipped iterations": Late(
        "glm_moe",
        {"num_layers": 2, "num_experts": 4, "qk_norm": True, "expert_bias": True, "shared_ffn_hidden_size": 16},
        {"ep": 2},
        {"bf16": True},
        skip=(2, 3),
        config={"every": 2},
    ),
}
STEPS = 3


def train_and_publish(rank: int, world_size: int, case: Late, sink_dir: str) -> list[tuple[int, list[Raw]]]:
    """Version and raw parameters after each publication of this rank."""
    quiet_megatron()
    from launch.megatron_model import build
    from launch.megatron_setup import Layout, Training
    from megasync.adapters.megatron import MegatronExporter
    from megasync.adapters.megatron_leaves import ddp_of
    from megasync.adapters.names import Rule
    from megasync.adapters.names_hf import table

    def add(gpt: torch.nn.Module) -> None:
        spare = torch.nn.Linear(128, 64, bias=False)
        rest = list(gpt._modules.items())
        gpt._modules.clear()
        gpt.add_module("spare", spare)  # first in module order: no other bucket's gather starts its own
        gpt._modules.update(rest)

    model = TinyModel(**case.model)
    run = build(model, Layout(**case.layout), Training(**case.training), amend=add if case.spare else None)
    names = table(case.table)
    if case.spare:
        names = names.extended(Rule("spare.weight", ("spare.weight",)))
    exporter = MegatronExporter(run.chunks, names, vocab_size=model.vocab_size)
    config = PublishConfig(timeout_s=30, max_first_density=1, **case.config)
    callback = MegasyncCallback(exporter, LocalSink(Path(sink_dir)), config)
    callback.on_train_start()

    def raws() -> list[Raw]:
        for chunk in run.chunks:
            ddp = ddp_of(chunk)
            if ddp.ddp_config.overlap_param_gather:
                ddp.start_param_sync(force_sync=True)
        return [r for chunk in run.chunks for r in raw_tensors(chunk)]

    out = [(0, raws())]
    optimize = run.optimizer.step
    for step in range(1, STEPS + 1):
        run.optimizer.step = (lambda: (False, None, None)) if step in case.skip else optimize
        run.train_step()
        if case.clip:
            for chunk in run.chunks:
                for name, weight in chunk.named_parameters():
                    if name.endswith("linear_qkv.weight"):
                        weight.data.mul_(0.5)
        if case.evaluate:
            run.logits(TOKENS)
        version = callback.step_end(skipped=step in case.skip)
        if version is not None:
            out.append((version, raws()))
    callback.flush()
    if callback.version != out[-1][0]:
        out.append((callback.version, raws()))
    assert all(o.durable for o in callback.outcomes)
    callback.close()
    run.destroy()
    return out


def words(t: torch.Tensor) -> np.ndarray:
    return t.contiguous().reshape(-1).view(torch.uint8).numpy().view(f"<u{t.element_size()}")


@pytest.mark.parametrize("name", CASES)
def test_every_version_is_what_the_trainer_holds_after_its_step(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    (tmp_path / "s").mkdir()
    ranks = run_ranks(train_and_publish, case.ranks, tmp_path, case, str(tmp_path / "s"), timeout_s=100.0)
    reader = PublicationReader(LocalSink(tmp_path / "s"), "run")
    newest = reader.newest()
    assert newest is not None
    m = TinyModel(**case.model)
    chain = reader.chain(newest)
    assert [v for v, _ in ranks[0]] == [c.version for c in chain]
    before: dict[str, np.ndarray] = {}
    for number, manifest in enumerate(chain):
        gathered = [raw for r in ranks for raw in r[number][1]]
        spare = [raw for raw in gathered if raw.name == "spare.weight"]
        expected = full_checkpoint(
            [raw for raw in gathered if raw.name != "spare.weight"],
            groups=m.num_groups,
            head_dim=m.head_dim,
            vocab_size=m.vocab_size,
            num_layers=m.num_layers,
            shared="shared_experts",
            mla=False,
        )
        if spare:
            expected["spare.weight"] = spare[0].data
        found = rebuild(reader, manifest)
        assert_same(found, {n: words(t) for n, t in expected.items()})
        if number:
            require_changes(name, before, found, case)
        before = found
    if case.config:
        assert [c.info for c in chain] == [{}] * 3  # version 0, after step 2, and what flush found after step 3
        assert {chain[2].frames.record(i).tensor_ids.size for i in range(len(chain[2].frames))} == {1}


def require_changes(name: str, before: dict[str, np.ndarray], after: dict[str, np.ndarray], case: Late) -> None:
    """What the case is about did change, or it would prove nothing."""
    changed = {n for n in after if not np.array_equal(before[n], after[n])}
    if case.spare:
        assert "spare.weight" in changed
    if _BIAS in "".join(after):
        assert sum(n.endswith(_BIAS) for n in changed) == case.model["num_layers"]
    if not case.skip:
        assert len(changed) > 0.9 * len(after), sorted(set(after) - changed)


def publish_with_an_idle_rank(rank: int, world_size: int, sink_dir: str, config: PublishConfig) -> list[bool]:
    """Two ranks hold halves, the last one nothing at all."""
    exporter = ShardedExporter(2, rank % 2, keep=[] if rank == world_size - 1 else None)
    callback = MegasyncCallback(exporter, LocalSink(Path(sink_dir)), config)
    callback.on_train_start()
    for step in (1, 2):
        exporter.load(step)
        callback.step_end()
    callback.on_train_end()
    return [o.durable for o in callback.outcomes]


@pytest.mark.parametrize("num_writers", [1, 3])
def test_case_84_more_trainer_ranks_than_engines_and_one_that_has_nothing(num_writers: int, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    config = replace(PublishConfig(timeout_s=20, max_first_density=1), num_writers=num_writers)
    verdicts = run_ranks(publish_with_an_idle_rank, 3, tmp_path, str(tmp_path / "s"), config, timeout_s=50.0)
    assert verdicts == [[True] * 3] * 3
    start, end = copy(full_model(0)), copy(full_model(2))
    engine = plain_engine({n: w.reshape(w.shape or (1,)) for n, w in start.items()})
    applier = Applier(engine, LocalSink(tmp_path / "s"), ApplyConfig(workers=1))
    assert applier.join().version == 0
    assert applier.update().versions == (1, 2)
    assert_same({n: words(t) for n, t in engine.live.items()}, end)
