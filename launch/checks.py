"""Refuses settings that cannot work, before anything starts: all faults at once, each with what to do instead.

After launch/compose.py; called by every process of a run and by launch/check.py. Must not import Megatron or transformers.
"""

from __future__ import annotations

from math import inf, isfinite

from launch.demo.sorting import Sorting
from launch.settings import Demo, Model, Parallel, Settings
from megasync.codecs.choice import check_codec
from megasync.config import GatherKind, SnapshotPlace
from megasync.manifest import check_run
from megasync.receiver.backends import backend_names
from megasync.sinks.registry import known_schemes

_LONGEST_S = 86_400.0
_MOST_DIGITS = 32
_OWN_MEMORY = ("memory", "pg")
_MOST_SEED = 2**31 - 1


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
    # What is below divides by these.
    faults = [*_size_faults(s.model, p), *_demo_faults(s.demo)]
    if not faults:
        faults = [*_model_faults(s.model, p), *_parallel_faults(s, world_size or p.ranks)]
    faults += _publish_faults(s)
    if not s.out.strip():
        faults.append("out is empty, expected a folder: is a variable of the shell not set?")
    if faults:
        one = len(faults) == 1
        listed = f" {faults[0]}" if one else "\n" + "\n".join(f"  - {fault}" for fault in faults)
        raise ValueError(f"this configuration cannot run:{listed}")
    return s


def _size_faults(m: Model, p: Parallel) -> list[str]:
    sizes = {
        f"parallel.{n}": getattr(p, n) for n in ("ranks", "tp", "pp", "chunks", "cp", "ep", "etp", "num_microbatches")
    }
    sizes |= {
        f"model.{n}": getattr(m, n)
        for n in ("num_layers", "hidden_size", "ffn_hidden_size", "num_heads", "num_groups", "head_dim", "vocab_size")
    }
    if m.num_experts:
        sizes |= {f"model.{n}": getattr(m, n) for n in ("moe_ffn_hidden_size", "top_k")}
    faults = [f"{name}={size}: every size must be at least 1" for name, size in sizes.items() if size < 1]
    if m.num_experts < 0:
        faults.append(f"model.num_experts={m.num_experts}: a number of experts, or 0 for a dense model")
    if not (isfinite(m.init_std) and m.init_std > 0):
        faults.append(f"model.init_std={m.init_std}: a deviation above 0")
    return faults


def _demo_faults(d: Demo) -> list[str]:
    ranges: dict[str, tuple[float, float]] = {
        "digits": (1, _MOST_DIGITS),
        "num_prompts": (1, inf),
        "num_samples": (2, inf),
        "warmup_steps": (0, inf),
        "learn_steps": (1, inf),
        "fine_steps": (0, inf),
        "control_steps": (0, inf),
        "seed": (0, _MOST_SEED),
        "show_every": (1, inf),
        "patience_s": (1e-3, _LONGEST_S),
        "warmup_lr": (0, 1),
        "learn_lr": (0, 1),
        "fine_lr": (0, 1),
        "min_rise": (-1, 1),
    }
    why = {"num_samples": ", since samples of one prompt are each other's baseline"}
    faults = []
    for name, (least, most) in ranges.items():
        found = getattr(d, name)
        if not least <= found <= most:
            limit = "" if most == inf else f" and at most {most:g}"
            faults.append(f"demo.{name}={found}: must be at least {least:g}{limit}{why.get(name, '')}")
    return faults


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
    if m.num_heads % m.num_groups:
        faults.append(
            f"model.num_heads={m.num_heads} is not a multiple of model.num_groups={m.num_groups}: change one of them"
        )
    if m.head_dim % 2:
        faults.append(f"model.head_dim={m.head_dim}: rotary positions turn pairs, so it must be even")
    if m.num_experts and m.top_k > m.num_experts:
        faults.append(f"model.top_k={m.top_k} with num_experts={m.num_experts}: a token takes at most all experts")
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


def _sink_faults(url: str | None) -> list[str]:
    if not url:
        return ["no sink: publications need a place that trainer and engine reach: sink=local, or sink.url=<URL>"]
    scheme, colon, rest = url.partition(":")
    scheme, known = scheme.lower(), known_schemes()
    if colon and scheme in _OWN_MEMORY:
        return [f"sink.url={url} ends with the trainer's processes: take a directory or an object store"]
    usable = ", ".join(f"{name}://" for name in sorted(known) if name not in _OWN_MEMORY)
    if "://" in url and scheme not in known:
        return [f"sink.url={url}: no sink for scheme {scheme!r}; take a path, or one of {usable}"]
    if scheme in known and not rest.startswith("//") and not (scheme == "file" and rest.startswith("/")):
        return [f"sink.url={url} is neither a URL nor a plain path: take a path (./{url}), or one of {usable}"]
    return []


def _publish_faults(s: Settings) -> list[str]:
    faults: list[str] = []
    for name, run in (("publish.run", s.publish.run), ("apply.run", s.apply.run)):
        if run != s.run:
            faults.append(f"{name}={run}: both ends follow run={s.run}; set run=<NAME> instead, which sets them")
    try:
        check_run(s.run)
    except ValueError as e:
        faults.append(f"run={s.run}: {e}")
    try:
        check_codec(s.publish.codec)
    except ValueError as e:
        faults.append(f"publish.codec={s.publish.codec}: {e}")
    if s.publish.sign_key != s.apply.sign_key:
        faults.append("sign_key: both ends need the same one; set sign_key=<TEXT>, which sets both")
    if s.engine.backend not in (known := backend_names("cpu")):
        faults.append(f"engine.backend={s.engine.backend}: on the CPU take one of {', '.join(known)}")
    faults += _sink_faults(s.sink.url)
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
    if Sorting.vocab_size > s.model.vocab_size:
        faults.append(f"model.vocab_size={s.model.vocab_size}: the task has {Sorting.vocab_size} tokens")
    return faults
