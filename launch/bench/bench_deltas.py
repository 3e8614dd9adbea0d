"""Benchmark of real deltas: the demo's training, exported as BF16 and as NVFP4 of the same weights, measured step by step.

For several learning rates, in phases of falling rate, and several numbers of steps between two syncs: how many words and
bytes change, in how many segments and blocks, how often amax moves (block scales, global scales), the order-0 bound, and
what each codec makes of it, published and read back. The model is small (megabytes: the demo's, wider), so manifests, the
fixed bytes of frames and the number of touched blocks say little about a large one. Shares of changed words say more: Adam
moves a weight by about the learning rate, whatever the number of weights. A BF16 weight w shows it once the steps since it was
last rounded add up to its rounding step, |w| / 256 to |w| / 128; so density grows with the rate and with the steps between
syncs, until most weights have moved, and small weights move first. An NVFP4 code moves only where a weight crosses the middle
between two codes, which lie 8 to 33 % of the block's largest weight apart, and is some fifty times rarer. Three minutes of
processor time.

    python -m launch.bench.bench_deltas models=[wide] steps=16
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import torch
from hydra.core.global_hydra import GlobalHydra

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from launch.bench.bench_payload import CODECS, published_nbytes
from launch.bench.deltas import State, amax_moves, changed_tiles, facts_of, keep
from launch.bench.entry import plain_hydra, refuse, register, settings_of
from launch.bench.payload_cases import INPUTS
from launch.bench.places import result_file
from launch.bench.rows import RESULTS, Row, RowWriter, middle, table, timed
from launch.bench.training import Export, Training, training
from megasync.versions.changes import cut_frames, mask_frame
from megasync.versions.encode import encode

MODELS = {
    "demo": (),
    "wide": (
        "model.hidden_size=256",
        "model.num_layers=4",
        "model.ffn_hidden_size=768",
        "model.num_heads=8",
        "model.num_groups=4",
        "model.head_dim=32",
        "demo.num_prompts=8",
        "demo.warmup_lr=1e-3",
    ),
    "moe": (
        "model=tiny_moe",
        "model.hidden_size=128",
        "model.num_experts=8",
        "model.moe_ffn_hidden_size=128",
        "model.head_dim=32",
        "demo.num_prompts=8",
        "demo.warmup_lr=1e-3",
    ),
}
"""Overrides of the demo's configuration: its own model, a wider one of 6 MB, and a wider one of its MoE, of 2 MB."""

ALL_CODECS = (*CODECS, "auto")

KEPT = (
    ("wide", "bf16", 1e-6, 1),
    ("wide", "bf16", 1e-5, 1),
    ("wide", "nvfp4", 1e-6, 1),
    ("wide", "nvfp4", 1e-6, 16),
    ("wide", "nvfp4", 1e-5, 1),
    ("moe", "nvfp4", 1e-6, 1),
)
"""Model, export, learning rate and steps between syncs of the masks that become inputs of bench_payload."""


@dataclass
class DeltaBench:
    """Configuration.

    Attributes:
        models: Names of ``MODELS``.
        learn_steps: Steps at the first rate before anything is measured.
        rates: Learning rates of the phases, in order.
        steps: Steps of a phase.
        spans: Steps between two syncs.
        samples: Deltas a phase, export and span; the last of them goes through every codec, all through the default one.
        keep: Where to keep masks as inputs of bench_payload; empty for nowhere.
        out: Folder of the result file, or the file itself, which ends in ``.jsonl``.
    """

    models: list[str] = field(default_factory=lambda: ["wide", "moe"])
    learn_steps: int = 20
    rates: list[float] = field(default_factory=lambda: [3e-4, 1e-4, 1e-5, 3e-6, 1e-6])
    steps: int = 32
    spans: list[int] = field(default_factory=lambda: [1, 4, 16])
    samples: int = 3
    keep: str = str(INPUTS)
    out: str = str(RESULTS)


@dataclass(frozen=True)
class Sync:
    """One delta to measure.

    Attributes:
        model: Name of the model.
        export: ``bf16`` or ``nvfp4``.
        lr: Learning rate.
        span: Steps since the last sync.
        sample: Number.
        reward: Mean reward over the phase.
    """

    model: str
    export: str
    lr: float
    span: int
    sample: int
    reward: float

    @property
    def name(self) -> str:
        """Name of the case."""
        return f"{self.model} {self.export} lr {self.lr:g} every {self.span}"


def starts(steps: int, span: int, samples: int) -> list[int]:
    """First steps of the deltas of a phase: spread evenly, the last one ending with the phase."""
    last = steps - span
    return [] if last < 0 else sorted({round(i * last / max(samples - 1, 1)) for i in range(samples)})


def measure(sync: Sync, codecs: Sequence[str], export: Export, old: State, new: State, out: RowWriter) -> None:
    """Count what changed, encode it with some codecs, publish, read back, and write the rows."""
    facts = facts_of(export.schema, old, new)
    if not facts.num_changed:
        raise RuntimeError(f"{sync.name}: nothing changed in {sync.span} steps: does it train?")
    frames = [
        mask_frame(export.schema, tiles) for tiles in cut_frames(export.schema, changed_tiles(export.schema, old, new))
    ]
    p50, p20, p80 = facts.segment_changed
    more = {k: v for k, v in asdict(facts).items() if k not in ("nbytes", "density", "segment_changed")}
    more |= {"segment_p50": p50, "segment_p20": p20, "segment_p80": p80}
    if moves := amax_moves(export.schema, old, new):
        more |= asdict(moves)
    more |= {k: v for k, v in asdict(sync).items() if k != "sample"} | {"num_tensors": len(export.schema.tensors)}
    for codec in codecs:
        delta, took = timed(lambda c=codec: encode(frames, c))  # type: ignore[misc]
        payload, manifest = published_nbytes(export.schema, delta, codec, frames)
        out.add(
            sync.name,
            nbytes_in=facts.nbytes,
            nbytes_out=payload + manifest,
            density=facts.density,
            sample=sync.sample,
            took=took,
            codec=codec,
            num_frames=len(frames),
            payload_nbytes=payload,
            manifest_nbytes=manifest,
            over_bound_ratio=round((payload + manifest) / facts.bound_nbytes, 5),
            payload_over_bound_ratio=round(payload / facts.bound_nbytes, 5),
            **more,
        )


def phase(model: str, run: Training, lr: float, config: DeltaBench) -> Iterator[tuple[Sync, Export, State, State]]:
    """Train a phase and give its deltas, oldest and newest state of each."""
    exports = {"bf16": run.bf16, "nvfp4": run.nvfp4}
    states: dict[str, list[State]] = {name: [e.state()] for name, e in exports.items()}
    rewards = []
    for _ in run.steps(config.steps, lr):
        rewards.append(run.reward)
        for name, e in exports.items():
            states[name].append(e.state())
    for name, e in exports.items():
        for span in config.spans:
            for i, at in enumerate(starts(config.steps, span, config.samples)):
                sync = Sync(model, name, lr, span, i, round(float(np.mean(rewards)), 4))
                yield sync, e, states[name][at], states[name][at + span]


def summary(rows: Sequence[Row]) -> str:
    """Medians by case, of the default codec."""
    lines = []
    for case in dict.fromkeys(r["case"] for r in rows):
        mine = [r for r in rows if r["case"] == case and r["codec"] == "sparse"]

        def of(column: str, mine: Sequence[Row] = mine) -> float:
            return middle(float(r[column]) for r in mine)[0]

        scales = f"{of('scales_ratio'):.3%}" if "scales_ratio" in mine[0] else ""
        cells = [
            f"{of('words_ratio'):.3%}",
            f"{of('density'):.3%}",
            f"{of('segment_p50'):.0f}",
            f"{of('pages_ratio'):.1%}",
            scales,
        ]
        cells += [
            f"{of('nbytes_out') / of('nbytes_in'):.3%}",
            f"{of('payload_over_bound_ratio'):.3f}",
            f"{of('reward'):.3f}",
        ]
        lines.append([case, *cells])
    header = ["delta", "words", "bytes", "a segment", "4 KiB", "scales", "fetched", "payload / bound", "reward"]
    return table(header, lines)


def run(config: DeltaBench) -> Path:
    """Train, measure and write.

    Returns:
        The result file.

    Raises:
        ValueError: A model that is not known.
    """
    if unknown := set(config.models) - set(MODELS):
        raise ValueError(f"unknown models {sorted(unknown)}; known: {', '.join(MODELS)}")
    torch.set_num_threads(1)
    path = result_file(config.out, "deltas-cpu.jsonl")
    with RowWriter(path, "deltas") as out:
        for model in config.models:
            began = time.perf_counter()
            with training(MODELS[model]) as trained:
                for _ in trained.steps(config.learn_steps, config.rates[0]):
                    pass
                for lr in config.rates:
                    for sync, export, old, new in phase(model, trained, lr, config):
                        last = sync.sample == config.samples - 1
                        measure(sync, ALL_CODECS if last else ALL_CODECS[:1], export, old, new, out)
                        if config.keep and last and (sync.model, sync.export, sync.lr, sync.span) in KEPT:
                            name = f"real_{sync.name.replace(' ', '_')}.npz"
                            keep(Path(config.keep) / name, export.schema, old, new)
                    print(
                        f"{model}: rate {lr:g} done, reward {sync.reward}, {time.perf_counter() - began:.0f} s",
                        flush=True,
                    )
        print(summary(out.rows))
    return path


register("bench_deltas", DeltaBench)


@hydra.main(version_base="1.3", config_name="bench_deltas", config_path=None)
def main(config: Any) -> None:
    """Entry point."""
    GlobalHydra.instance().clear()  # the demo's configuration is composed next, and Hydra has one at a time
    folders = ("keep",)
    found = settings_of(DeltaBench, config, least={"learn_steps": 0}, choices={"models": MODELS}, folders=folders)
    if beyond := [span for span in found.spans if span > found.steps]:
        refuse(f"spans={beyond}: a phase has steps={found.steps}, so no delta is that long: shorten spans or add steps")
    run(found)


if __name__ == "__main__":
    plain_hydra(DeltaBench, cuda=False)
    main()
