"""What a run is made of, as typed configuration: Hydra composes it from configs/, ``check`` refuses what cannot work.

The dataclasses here are registered with Hydra as the schema of configs/main.yaml, so a key that nobody knows is an error
when the configuration is composed. ``publish`` and ``apply`` are megasync's own dataclasses. Read by launch/train.py,
launch/rollout.py and launch/check.py. Must not import Megatron or transformers: every process pays for its imports.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launch.demo.sorting import Sorting
from megasync.config import ApplyConfig, GatherKind, PublishConfig, SnapshotPlace

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


@dataclass
class Model:
    """A small model of a known family (group ``model``).

    Attributes:
        hf: Family in transformers: ``Llama``, ``Qwen3`` or ``Qwen3Moe``.
        table: Naming table of the Megatron adapter that belongs to it.
        num_layers: Decoder layers.
        hidden_size: Width.
        ffn_hidden_size: Inner width of a dense MLP.
        num_heads: Query heads.
        num_groups: Key and value heads.
        head_dim: Size of a head.
        vocab_size: Vocabulary.
        tied: Share the embedding with the output layer.
        qk_norm: RMSNorm on query and key heads.
        num_experts: Routed experts; 0 for a dense model.
        moe_ffn_hidden_size: Inner width of an expert.
        top_k: Experts per token.
        lora_rank: Rank of low-rank adapters; only 0 can be published as deltas.
    """

    hf: str = "Llama"
    table: str = "llama"
    num_layers: int = 2
    hidden_size: int = 64
    ffn_hidden_size: int = 128
    num_heads: int = 4
    num_groups: int = 2
    head_dim: int = 16
    vocab_size: int = 16
    tied: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    moe_ffn_hidden_size: int = 32
    top_k: int = 2
    lora_rank: int = 0


@dataclass
class Parallel:
    """The parallel layout of the trainer (group ``parallel``); data parallelism takes the ranks that are left.

    Attributes:
        ranks: Ranks that demo.sh starts.
        tp: Tensor parallel ranks.
        pp: Pipeline stages.
        chunks: Model chunks per stage (virtual pipeline).
        cp: Context parallel ranks.
        ep: Expert parallel ranks.
        etp: Tensor parallel ranks inside an expert.
        sequence_parallel: Split activations of norms along the sequence.
        num_microbatches: Micro batches a step and data parallel rank.
    """

    ranks: int = 4
    tp: int = 1
    pp: int = 1
    chunks: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False
    num_microbatches: int = 1

    @property
    def dp(self) -> int:
        """Data parallel ranks."""
        return self.ranks // (self.tp * self.pp * self.cp)


@dataclass
class SinkPlace:
    """Where publications go (group ``sink``).

    Attributes:
        url: A path or a URL that ``megasync.sinks.registry.open_sink`` knows; None is refused.
    """

    url: str | None = None


@dataclass
class EngineChoice:
    """The engine that generates (group ``engine``).

    Attributes:
        kind: ``hugging_face``: a live transformers model in the rollout process.
        backend: What applies: ``auto`` or the name of one.
        colocated: Whether trainer and engine take turns on one device; only False can take deltas.
    """

    kind: str = "hugging_face"
    backend: str = "auto"
    colocated: bool = False


@dataclass
class Demo:
    """The task and the schedule (group ``demo``).

    Attributes:
        digits: Digits to sort.
        num_prompts: Prompts a batch.
        num_samples: Samples a prompt, which are each other's baseline.
        warmup_steps: Supervised steps before version 0.
        warmup_lr: Their learning rate.
        learn_steps: Policy gradient steps at a rate that learns in a minute.
        learn_lr: That rate.
        fine_steps: Policy gradient steps after them at a rate that is usual for large models.
        fine_lr: That rate.
        control_steps: Steps of the control run, whose engine never applies; 0 for none.
        seed: Of weights, prompts and samples.
        patience_s: Longest wait of one process for the other.
        show_every: Steps between lines of progress.
    """

    digits: int = 5
    num_prompts: int = 32
    num_samples: int = 8
    warmup_steps: int = 25
    warmup_lr: float = 3e-3
    learn_steps: int = 160
    learn_lr: float = 5e-4
    fine_steps: int = 20
    fine_lr: float = 1e-6
    control_steps: int = 40
    seed: int = 1
    patience_s: float = 120.0
    show_every: int = 10

    @property
    def num_rows(self) -> int:
        """Sequences a step."""
        return self.num_prompts * self.num_samples


@dataclass
class Settings:
    """Everything. See configs/main.yaml for the defaults of the groups.

    Attributes:
        run: Name of the run in the sink.
        out: Folder for samples, records, report and, by default, the sink.
        model: The model.
        parallel: The trainer's parallel layout.
        publish: Trainer side of megasync; the groups codec, snapshot and gather fill it.
        sink: Where publications go.
        engine: The engine.
        apply: Receiver side of megasync.
        demo: Task and schedule.
    """

    run: str = "demo"
    out: str = "outputs/demo"
    model: Model = field(default_factory=Model)
    parallel: Parallel = field(default_factory=Parallel)
    publish: PublishConfig = field(default_factory=PublishConfig)
    sink: SinkPlace = field(default_factory=SinkPlace)
    engine: EngineChoice = field(default_factory=EngineChoice)
    apply: ApplyConfig = field(default_factory=ApplyConfig)
    demo: Demo = field(default_factory=Demo)


@dataclass(frozen=True)
class Phase:
    """Steps at one learning rate."""

    name: str
    steps: int
    lr: float


@dataclass(frozen=True)
class Episode:
    """One training run from the first weights on.

    Attributes:
        run: Its name in the sink.
        apply: Whether the engine applies what is published.
        phases: Policy gradient phases, in order.
    """

    run: str
    apply: bool
    phases: tuple[Phase, ...]

    @property
    def num_steps(self) -> int:
        """Steps of all phases."""
        return sum(p.steps for p in self.phases)


def episodes(settings: Settings) -> list[Episode]:
    """What trainer and rollout go through, in this order: the control, then the run itself."""
    d = settings.demo
    control = Episode(f"{settings.run}-control", False, (Phase("control", d.control_steps, d.learn_lr),))
    learn = Episode(
        settings.run, True, (Phase("learn", d.learn_steps, d.learn_lr), Phase("fine", d.fine_steps, d.fine_lr))
    )
    return [e for e in (control, learn) if e.num_steps]


def register() -> None:
    """Make ``Settings`` the schema ``settings`` of Hydra's configuration store."""
    schema = OmegaConf.structured(Settings)
    for node in (schema.publish, schema.apply):
        OmegaConf.set_readonly(node, False)  # frozen dataclasses would refuse the groups' values
    ConfigStore.instance().store(name="settings", node=schema)


def compose(overrides: Sequence[str] = ()) -> Settings:
    """Compose the configuration as Hydra's command line does.

    Args:
        overrides: Such as ``parallel=pp2`` or ``publish.every=2``.

    Raises:
        ValueError: A key, a choice or a value that is not known; the message says what is.
    """
    register()
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return settings_of(hydra_compose("main", list(overrides)))
    except (HydraException, OmegaConfBaseException) as e:
        raise ValueError(_explain(e, overrides)) from e


def settings_of(config: Any) -> Settings:
    """The typed settings of what Hydra composed.

    Raises:
        ValueError: From the checks of the dataclasses.
    """
    found: Settings = OmegaConf.to_object(config)
    return found


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
    faults = [*_model_faults(s.model, s.parallel), *_parallel_faults(s, world_size or s.parallel.ranks)]
    faults += _publish_faults(s)
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
    if min(p.tp, p.pp, p.chunks, p.cp, p.ep, p.etp, p.num_microbatches, world_size) < 1:
        return [f"parallel: every size must be at least 1, not {p}"]
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
    if s.publish.sign_key != s.apply.sign_key:
        faults.append("publish.sign_key and apply.sign_key differ: give both sides the same key")
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


def _explain(error: Exception, overrides: Sequence[str]) -> str:
    """Hydra's words, without its advice to append keys (every key here is known), and the nearest known key."""
    told = [str(error).split("\nTo append")[0]]
    if error.__cause__ is not None:
        told.append(str(error.__cause__).strip())
    known = sorted(_keys(Settings, ""))
    for override in overrides:
        key = override.split("=", 1)[0].lstrip("+~").split("@", 1)[0]
        if key not in known and not (CONFIGS / key).is_dir():
            near = difflib.get_close_matches(key, known, 3, 0.5) or [k for k in known if k.startswith(key.split(".")[0])]
            told.append(f"{key!r} is not a setting; did you mean {', '.join(near) or 'one of ' + ', '.join(known)}?")
    return "\n".join(dict.fromkeys(told))


def _keys(settings: type, prefix: str) -> set[str]:
    found: set[str] = set()
    for f in fields(settings):
        default = f.default_factory() if callable(f.default_factory) else f.default
        found |= _keys(type(default), f"{prefix}{f.name}.") if is_dataclass(default) else {prefix + f.name}
    return found
