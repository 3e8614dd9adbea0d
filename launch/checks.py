"""Refuses settings that cannot work, before anything starts: all faults at once, each with what to do instead.

After launch/compose.py; called by every process of a run and by launch/check.py. Must not import Megatron or transformers.
"""

from __future__ import annotations

from launch.demo.sorting import Sorting
from launch.settings import Model, Parallel, Settings
from megasync.config import GatherKind, SnapshotPlace


def check(s: Settings, world_size: int | None = None) -> Settings:
    """Refuse combinations that cannot work, all of them at once.

    Args:
        s: The settings.
        world_size: Ranks that were started; those of ``parallel.ranks`` by default.

    Returns:
        The settings, unchanged.

    Raises:
        ValueError: Every fault, each with what to do instead.
    """
    p = s.parallel
    if min(p.ranks, p.tp, p.pp, p.chunks, p.cp, p.ep, p.etp, p.num_microbatches) < 1:
        raise ValueError(f"this configuration cannot run: every size must be at least 1, not {p}")
    faults = [*_model_faults(s.model, p), *_parallel_faults(s, world_size or p.ranks), *_publish_faults(s)]
    if faults:
        raise ValueError("this configuration cannot run:\n" + "\n".join(f"  - {fault}" for fault in faults))
    return s


def _model_faults(m: Model, p: Parallel) -> list[str]:
    faults: list[str] = []
    known = {"Llama": "llama", "Qwen3": "llama", "Qwen3Moe": "qwen_moe"}
    if known.get(m.hf) != m.table:
        pairs = ", ".join(f"{hf} with {table}" for hf, table in known.items())
        faults.append(f"model.hf={m.hf} with model.table={m.table}: take one of {pairs}")
    if (m.hf == "Qwen3Moe") != bool(m.num_experts):
        faults.append(f"model.hf={m.hf} with num_experts={m.num_experts}: experts need Qwen3Moe, and it needs experts")
    if m.lora_rank:
        faults.append(
            f"model.lora_rank={m.lora_rank}: adapters are small and are loaded whole by the engine's own adapter call; "
            "deltas are for full weights: set model.lora_rank=0"
        )
    for name, size in (("num_heads", m.num_heads), ("num_groups", m.num_groups)):
        if size % p.tp:
            faults.append(f"model.{name}={size} is not a multiple of parallel.tp={p.tp}: change one of them")
    if m.num_layers % (p.pp * p.chunks):
        faults.append(
            f"model.num_layers={m.num_layers} is not a multiple of pp={p.pp} x chunks={p.chunks}: add layers, or take "
            "fewer stages"
        )
    if m.num_experts % p.ep or (p.ep > 1 and not m.num_experts):
        faults.append(f"parallel.ep={p.ep} with num_experts={m.num_experts}: take model=tiny_moe, or parallel.ep=1")
    return faults


def _parallel_faults(s: Settings, world_size: int) -> list[str]:
    p, d = s.parallel, s.demo
    faults: list[str] = []
    size = p.tp * p.pp * p.cp
    if world_size % size:
        return [
            f"parallel: tp {p.tp} x pp {p.pp} x cp {p.cp} = {size} does not divide the {world_size} ranks: start "
            f"{size * max(1, world_size // size)} (parallel.ranks, torchrun --nproc-per-node) or choose smaller sizes"
        ]
    if world_size != p.ranks:
        faults.append(f"parallel.ranks={p.ranks}, but {world_size} ranks were started: make them equal")
    if (p.tp * p.cp * p.dp) % (p.ep * p.etp):
        faults.append(
            f"parallel: ep {p.ep} x etp {p.etp} does not divide the {p.tp * p.cp * p.dp} ranks of a pipeline stage"
        )
    if p.etp > 1 and p.ep > 1:
        faults.append("parallel: etp and ep above 1 need uneven all-gathers, which gloo cannot do: set parallel.etp=1")
    if p.sequence_parallel and p.tp == 1:
        faults.append("parallel.sequence_parallel=true means nothing with tp=1: set it to false, or tp to 2")
    if p.tp > 1 and s.model.num_experts and not p.sequence_parallel:
        faults.append("experts with tp above 1 need parallel.sequence_parallel=true in Megatron-core")
    if p.chunks > 1 and (p.pp == 1 or p.num_microbatches % p.pp):
        faults.append(f"parallel.chunks={p.chunks} needs pp > 1 and num_microbatches a multiple of pp={p.pp}")
    parts = p.dp * p.num_microbatches
    if d.num_prompts % p.dp or d.num_rows % parts:
        faults.append(
            f"demo: {d.num_prompts} prompts ({d.num_rows} rows) do not divide by dp {p.dp} x {p.num_microbatches} micro "
            f"batches: make demo.num_prompts a multiple of {parts}"
        )
    return faults


def _publish_faults(s: Settings) -> list[str]:
    faults: list[str] = []
    if not s.sink.url:
        faults.append("no sink: publications need a place that trainer and engine reach: sink=local, or sink.url=<URL>")
    elif s.sink.url.startswith(("memory:", "pg:")):
        faults.append(f"sink.url={s.sink.url} ends with the trainer's processes: take a directory or an object store")
    if s.engine.kind != "hugging_face":
        faults.append(f"engine.kind={s.engine.kind}: this job runs a transformers model: engine=hugging_face")
    if s.engine.colocated:
        faults.append(
            "engine.colocated=true: a colocated engine drops its weights while the trainer works, so a delta has no base; "
            "set engine.colocated=false, or hand over whole weights in memory"
        )
    if s.publish.gather is GatherKind.NCCL:
        faults.append("gather=nccl needs CUDA devices, this job runs on the CPU: take gather=gloo or gather=direct")
    if s.publish.snapshot is SnapshotPlace.DEVICE:
        faults.append("snapshot=device needs CUDA devices, this job runs on the CPU: take snapshot=host")
    if s.publish.num_writers > s.parallel.ranks:
        faults.append(f"publish.num_writers={s.publish.num_writers} with {s.parallel.ranks} ranks: lower it")
    d = s.demo
    if d.learn_steps < 1 or min(d.control_steps, d.fine_steps, d.warmup_steps) < 0:
        faults.append("demo: learn_steps must be at least 1, the other step counts at least 0")
    if d.num_samples < 2:
        faults.append(f"demo.num_samples={d.num_samples}: samples of one prompt are each other's baseline: at least 2")
    if Sorting.vocab_size > s.model.vocab_size:
        faults.append(f"model.vocab_size={s.model.vocab_size}: the task has {Sorting.vocab_size} tokens")
    return faults
