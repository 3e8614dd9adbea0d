"""Benchmark of payload sizes: all bytes that a receiver must fetch, against the order-0 bound, every codec in one run.

Counted are payload and manifest, with its frame table and digests, as the publisher writes them; ``log2 C(n, k) + k H(value)``
bits is what no coder of independent entries can go below. Masks A to D and the clustered ones are one large tensor each;
``list-article`` and ``list-steps`` are one of 64 owners' share of the model-like list (its manifest has digests of tensors
that owners share, so all owners together need less). ``real ...`` are masks of a training run, as bench_deltas kept
them: of a small model, so manifest and short frames weigh more than they would. Everything is read back from the sink,
decoded and compared. The peer ``zstd-1 of the mask`` is CPU Zstd level 1 on frames of at most 1 MiB of mask, untouched
tiles left out, without any metadata. Targets: 1.05 x the bound on masks A to D, 1.15 x on the list at 0.085 %, fewer bytes
than the peer on all of these (without metadata it wins on real deltas of a few kilobytes).

    python -m launch.bench.bench_payload nbytes=268435456
    python -m launch.bench.bench_payload only=real       # these cases anew, the other rows as they are
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import hydra
import numpy as np
import torch
import zstandard

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from launch.bench.entry import plain_hydra, refuse, register, settings_of
from launch.bench.masks import KINDS
from launch.bench.payload_cases import INPUTS, RUN, Case, list_case, mask_case, real_case
from launch.bench.places import result_file
from launch.bench.rows import RESULTS, Row, RowWriter, Timed, read_rows, table, timed
from megasync.codecs.dense import block_bounds, mask_of
from megasync.config import PublishConfig
from megasync.digest import content_digest
from megasync.schema import Schema
from megasync.sinks.memory import MemorySink
from megasync.trainer.publish import publish
from megasync.trainer.publishing import Publishing
from megasync.types import Entries
from megasync.versions.anchor import publish_checkpoint
from megasync.versions.changes import MaskedFrame, cut_frames, mask_frame
from megasync.versions.encode import EncodedDelta, encode
from megasync.versions.head import claim
from megasync.versions.lineage import start_lineage
from megasync.versions.publication import PublicationReader

PEER = "zstd-1 of the mask"
CODECS = ("sparse", "zstd", "snappy", "lz4", "snappy+zstd", "lz4+zstd")
_LEAST_NBYTES = 1 << 20  # of a mask: fewer words make the bound one of single words
_MOST_DENSITY = 0.5  # of bytes, which words of two bytes must be able to change


@dataclass
class PayloadBench:
    """Configuration.

    Attributes:
        nbytes: Bytes of each mask.
        sweep_nbytes: Bytes of masks in the sweep over densities.
        sweep: Densities, changed words / all words.
        scale: Share of the model that the list is made for: 1 is 445 GB, of which one owner's part is encoded.
        list_densities: Changed bytes / all bytes on the list; the first has the target and runs every codec.
        out: Folder of the result file, or the file itself, which ends in ``.jsonl``.
        only: Take only the cases whose names start so, and keep the rows of the others.
    """

    nbytes: int = 256 << 20
    sweep_nbytes: int = 64 << 20
    sweep: list[float] = field(default_factory=lambda: [0.0001, 0.001, 0.01, 0.05, 0.2, 0.5])
    scale: float = 1.0
    list_densities: list[float] = field(default_factory=lambda: [0.00085, 0.00001, 0.01])
    out: str = str(RESULTS)
    only: str = ""


def cases(config: PayloadBench) -> Iterator[Case]:
    """All cases; their words are drawn when they are measured."""
    for kind in KINDS.values():
        yield mask_case(kind, config.nbytes)
    for density in config.sweep:
        for name in ("uniform", "bf16"):
            yield mask_case(KINDS[name], config.sweep_nbytes, density)
    for i, density in enumerate(config.list_densities):
        for how in ("article", "steps"):
            yield list_case(how, density, config.scale, decisive=i == 0)
    for path in sorted(INPUTS.glob("real_*.npz")):
        yield real_case(path)


def measure(case: Case, out: RowWriter) -> None:
    """Encode a case with each codec, publish, read back, and write the rows."""
    frames = [mask_frame(case.schema, tiles) for tiles in cut_frames(case.schema, case.tiles())]
    peer_nbytes, peer_took = timed(lambda: _peer_nbytes(frames))
    for codec in CODECS if case.every_codec else CODECS[:2]:
        delta, took = timed(lambda c=codec: encode(frames, c))  # type: ignore[misc]
        payload, manifest = published_nbytes(case.schema, delta, codec, frames)
        target = case.target if codec == "sparse" else 0.0
        more = {"payload_nbytes": payload, "manifest_nbytes": manifest, "peer_nbytes": peer_nbytes, "target": target}
        _add(out, case, codec, payload + manifest, took, num_frames=len(frames), num_tensors=len(delta.touched), **more)
    _add(out, case, PEER, peer_nbytes, peer_took)


def _add(out: RowWriter, case: Case, codec: str, nbytes: int, took: Timed, **more: Any) -> None:
    row = out.add(
        case.name,
        nbytes_in=case.nbytes,
        nbytes_out=nbytes,
        density=case.density,
        took=took,
        codec=codec,
        bound_nbytes=round(case.bound_nbytes, 1),
        over_bound_ratio=round(nbytes / case.bound_nbytes, 5),
        num_changed=sum(h.num_changed for h in case.seen.values()),
        **more,
    )
    print(
        f"{case.name:>22} {codec:>18}: {nbytes:>11} bytes, {row['over_bound_ratio']:.4f} x bound, "
        f"{nbytes / case.nbytes:.4%} of the weights, {took.cpu_s:.2f} s of CPU time",
        flush=True,
    )


def _peer_nbytes(frames: Sequence[MaskedFrame]) -> int:
    compressor = zstandard.ZstdCompressor(level=1)
    total = 0
    for frame in frames:
        mask = mask_of(frame.entries).data.cast("B")
        bounds = block_bounds(frame.entries.tile_words, frame.entries.word_nbytes).tolist()
        total += sum(len(compressor.compress(mask[a:b])) for a, b in zip(bounds[:-1], bounds[1:], strict=True))
    return total


def published_nbytes(schema: Schema, delta: EncodedDelta, codec: str, frames: Sequence[MaskedFrame]) -> tuple[int, int]:
    """Payload and manifest bytes of a publication.

    Raises:
        RuntimeError: It was not published, or what is read back from the sink is not what was encoded.
    """
    sink = MemorySink()
    publishing = Publishing(schema, sink, PublishConfig(run=RUN, codec=codec), None, None, Event())
    none = np.zeros((len(schema.tensors), 2), dtype=np.uint64)
    lineage = publish_checkpoint(sink, start_lineage(schema, claim(sink, RUN), none))
    outcome, _ = publish(publishing, delta, None, 1, lineage, {})
    if not outcome.durable:
        raise RuntimeError(f"{codec}: not published: {outcome.error}")
    reader = PublicationReader(sink, RUN)
    manifest = reader.newest()
    assert manifest is not None  # the head is durable
    for (_, found), frame in zip(reader.entries(manifest), frames, strict=True):
        if _print_of(found) != _print_of(frame.entries):
            raise RuntimeError(f"{codec}: what was read back is not what was encoded")
    return outcome.payload_nbytes, outcome.manifest_nbytes


def _print_of(entries: Entries) -> bytes:
    columns = (entries.tensor_ids, entries.tiles, entries.counts, entries.positions, entries.values)
    return content_digest([np.ascontiguousarray(c).data.cast("B") for c in columns])


def summary(rows: Sequence[Row]) -> str:
    """Fetched bytes over the bound by case and codec, targets beside them."""
    codecs = list(dict.fromkeys(r["codec"] for r in rows))
    lines = []
    for name in dict.fromkeys(r["case"] for r in rows):
        mine = {r["codec"]: r for r in rows if r["case"] == name}
        sparse = mine["sparse"]
        cells = [f"{mine[c]['over_bound_ratio']:.3f}" if c in mine else "" for c in codecs]
        target = f"{sparse['target']:.2f}" if sparse["target"] else ""
        lines.append([name, f"{sparse['bound_nbytes'] / sparse['nbytes_in']:.4%}", *cells, target])
    return table(["mask", "bound", *codecs, "target"], lines)


def run(config: PayloadBench) -> Path:
    """Take all samples and write them.

    Returns:
        The result file.
    """
    torch.set_num_threads(1)
    path = result_file(config.out, "payload-cpu.jsonl")
    old = read_rows(path) if config.only and path.exists() else []
    with RowWriter(path, "payload", [r for r in old if not r["case"].startswith(config.only)]) as out:
        for case in cases(config):
            if case.name.startswith(config.only):
                measure(case, out)
        print(summary(out.rows))
    return path


register("bench_payload", PayloadBench)


@hydra.main(version_base="1.3", config_name="bench_payload", config_path=None)
def main(config: Any) -> None:
    """Entry point."""
    least = dict.fromkeys(("nbytes", "sweep_nbytes"), _LEAST_NBYTES)
    most = {"sweep": 1.0, "list_densities": _MOST_DENSITY}
    found = settings_of(PayloadBench, config, least, most, empty=("sweep", "list_densities"))
    known = [case.name for case in cases(found)]
    if not any(name.startswith(found.only) for name in known):
        refuse(f"only={found.only}: no case begins so; there are {', '.join(known) or 'none'}")
    run(found)


if __name__ == "__main__":
    plain_hydra(PayloadBench, cuda=False)
    main()
