"""What a run is made of, as typed settings: the schema of configs/main.yaml.

launch/compose.py has Hydra fill them from configs/, launch/checks.py refuses what cannot work. ``publish`` and ``apply``
are megasync's own dataclasses. Must not import Hydra, Megatron or transformers: every process pays for its imports.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megasync.config import ApplyConfig, PublishConfig


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
        init_std: Deviation of the first weights.
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
    init_std: float = 0.02
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
        min_rise: How far the last reward must be above the control's for the demo to pass.
    """

    digits: int = 5
    num_prompts: int = 32
    num_samples: int = 8
    warmup_steps: int = 12
    warmup_lr: float = 3e-3
    learn_steps: int = 220
    learn_lr: float = 5e-4
    fine_steps: int = 25
    fine_lr: float = 1e-6
    control_steps: int = 30
    seed: int = 1
    patience_s: float = 120.0
    show_every: int = 10
    min_rise: float = 0.1

    @property
    def num_rows(self) -> int:
        """Sequences a step."""
        return self.num_prompts * self.num_samples


@dataclass
class Settings:
    """Everything. See configs/main.yaml for the defaults of the groups.

    Attributes:
        run: Name of the run in the sink.
        sign_key: Text that both ends sign and check manifests with; empty for unsigned ones. Whoever lists processes sees a
            command line: give it as ``sign_key=${oc.env:NAME}``.
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
    sign_key: str = ""
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
