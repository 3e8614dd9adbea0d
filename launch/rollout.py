"""Generates with a live Hugging Face model that follows the trainer's weights through megasync; one process.

    python launch/rollout.py [the overrides that the trainer got]

Between two batches it applies, one by one, all versions that were published meanwhile; launch/demo.sh starts it beside
the trainer. Needs no Megatron.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import hydra
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from launch.checks import check
from launch.compose import CONFIGS, refuse, register, settings_of
from launch.demo.full_gather import sha256_of
from launch.demo.sampler import build_model, checkpoint_of, generate
from launch.demo.samples import Made, SampleFolder, Samples
from launch.demo.sorting import Sorting
from launch.settings import Episode, Settings, episodes
from megasync import Applier, Sink, open_sink
from megasync.adapters.torch_module_hf import TransformersEngine
from megasync.manifest import Manifest
from megasync.receiver.ledger import Ledger
from megasync.receiver.results import UpdateResult
from megasync.receiver.route import steps
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
    d, task = s.demo, Sorting(s.demo.digits)
    folder = SampleFolder(Path(s.out) / "samples" / episode.run, d.patience_s)
    model = build_model(s.model)
    config = replace(s.apply, run=episode.run)
    engine = TransformersEngine(model)
    # One publication a call, so that the live weights of every version can be looked at.
    applier = Applier(engine, sink, config, backend=s.engine.backend, route=next_step)
    head = PublicationReader(sink, episode.run, config.sign_key or None, config.timeout_s).newest
    folder.wait(head, f"the first version of run {episode.run!r} in {sink.describe()}", config.poll_s)

    def applied(result: UpdateResult) -> dict[str, Any]:
        row = {"kind": "applied", "run": episode.run, "sha256": sha256_of(checkpoint_of(model)), **asdict(result)}
        record(row)
        return row

    def catch_up(newest: dict[str, Any]) -> dict[str, Any]:
        while (result := applier.update()).versions:
            newest = applied(result)
        return newest

    newest = applied(applier.join())
    for number in range(episode.num_steps):
        generator = torch.Generator().manual_seed(d.seed + number)
        prompts = task.prompts(d.num_prompts, generator).repeat_interleave(d.num_samples, dim=0)
        with engine.serving() as version:
            tokens = generate(model, prompts, d.digits, generator)
        rewards = task.rewards(tokens)
        facts = {name: newest[name] for name in ("sha256", "density", "pause_s")}
        made = Made(version, float(rewards.mean()), payload_nbytes=newest["fetched_nbytes"], **facts)
        record({"kind": "made", "run": episode.run, "batch": number, **asdict(made)})
        if episode.apply:
            # Before the batch is handed over: what is learned from it cannot make the next one.
            newest = catch_up(newest)
        folder.put(number, Samples(tokens, rewards, made))
    folder.wait(lambda: folder.last_version() is not None, "the trainer to finish")
    if episode.apply:
        catch_up(newest)
    applier.close()


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
    try:
        s = check(settings_of(config))
    except ValueError as e:
        print(f"rollout failed: {e}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None  # no fault of the program: a traceback would bury the line that helps
    try:
        warnings.filterwarnings("ignore")
        logging.basicConfig(format="%(message)s")
        torch.set_num_threads(1)
        roll_all(s)
    except Exception as e:
        print(f"rollout failed: {type(e).__name__}: {e}", file=sys.stderr, flush=True)
        raise


if __name__ == "__main__":
    if fault := refuse(sys.argv[1:]):
        print(f"rollout failed: {fault}", file=sys.stderr)
        sys.exit(2)
    register()
    main()
