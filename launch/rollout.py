"""Generates with a live Hugging Face model that follows the trainer's weights through megasync; one process.

    python launch/rollout.py [the overrides that the trainer got]

Between two batches it applies, one by one, all versions that were published meanwhile; launch/demo.sh starts it beside
the trainer. Needs no Megatron.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from launch.demo.full_gather import sha256_of
from launch.demo.sampler import build_model, checkpoint_of, generate
from launch.demo.samples import Made, SampleFolder, Samples
from launch.demo.sorting import Sorting
from launch.checks import check
from launch.compose import CONFIGS, register, settings_of
from launch.settings import Episode, Settings, episodes
from megasync.manifest import Manifest
from megasync.receiver.applier import Applier
from megasync.receiver.ledger import Ledger
from megasync.receiver.results import UpdateResult
from megasync.receiver.route import steps
from megasync.sinks.base import Sink
from megasync.sinks.registry import open_sink
from megasync.versions.publication import PublicationReader

Record = Callable[[dict[str, Any]], None]


def roll(s: Settings, episode: Episode, sink: Sink, record: Record) -> None:
    """Generate the batches of one episode.

    Args:
        s: Settings.
        episode: Whether to apply, and how many batches.
        sink: Where the trainer publishes.
        record: Keeps a row of facts.
    """
    task, d = Sorting(s.demo.digits), s.demo
    folder = SampleFolder(Path(s.out) / "samples" / episode.run, d.patience_s)
    model = build_model(s.model)
    config = replace(s.apply, run=episode.run)
    # One step at a time, so that the live weights of every version can be looked at.
    applier = Applier(engine_of(model), sink, config, backend=s.engine.backend, route=next_step)
    head = PublicationReader(sink, episode.run, config.sign_key or None, config.timeout_s).newest
    folder.wait(head, f"version 0 of run {episode.run!r}")
    newest = applier.join()

    def applied(result: UpdateResult) -> None:
        row = {"kind": "applied", "run": episode.run, "version": result.version, "density": result.density}
        row |= {"pause_s": result.pause_s, "stage_s": result.stage_s, "total_s": result.total_s}
        record(row | {"fetched_nbytes": result.fetched_nbytes, "sha256": sha256_of(checkpoint_of(model))})

    def catch_up() -> None:
        nonlocal newest
        while (result := applier.update()).versions:
            newest = result
            applied(result)

    applied(newest)
    for number in range(episode.num_steps):
        if episode.apply:
            catch_up()
        generator = torch.Generator().manual_seed(d.seed + number)
        prompts = task.prompts(d.num_prompts, generator).repeat_interleave(d.num_samples, dim=0)
        tokens = generate(model, prompts, d.digits, generator)
        rewards = task.rewards(tokens)
        made = Made(applier.version, float(rewards.mean()), newest.density, newest.pause_s)
        record({"kind": "made", "run": episode.run, "batch": number, "version": made.version, "reward": made.reward})
        folder.put(number, Samples(tokens, rewards, made))
    folder.wait(lambda: folder.last_version() is not None, "the trainer to finish")
    if episode.apply:
        catch_up()
        assert applier.version == folder.last_version()
    applier.close()


def engine_of(model):
    from scratch_engine import engine_of
    return engine_of(model)


def next_step(reader: PublicationReader, held: Ledger, wanted: Manifest) -> list[Manifest]:
    """Route of the applier: only the next publication on the way."""
    return steps(reader, held, wanted)[:1]


def roll_all(s: Settings) -> None:
    """Every episode, one after the other."""
    with Path(s.out, "rollout.jsonl").open("a") as out:

        def record(row: dict[str, Any]) -> None:
            out.write(json.dumps(row) + "\n")
            out.flush()

        for episode in episodes(s):
            with open_sink(s.sink) as sink:
                roll(s, episode, sink, record)


@hydra.main(config_path=str(CONFIGS), config_name="main", version_base="1.3")
def main(config: Any) -> None:
    """Entry point."""
    s = check(settings_of(config))
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    roll_all(s)


if __name__ == "__main__":
    register()
    main()
