"""The pause of an engine that is really decoding (P1c), and the latency of its tokens with and without syncs.

``python -m launch.bench.bench_engine`` on a GPU. One rank of a TP4 engine holds 111 GB of live weights; a decoder whose
matrices are views of them makes greedy tokens from a captured CUDA graph, and an `Applier` with the scatter backend takes
versions of 64 owners from a directory in memory, pausing the decode loop. The pause is taken from the loop's own clock: end
of the last token before to end of the first token after. Checked: the first tokens after each pause are those that an eager
forward makes from the live bytes, the graph's logits change with every version and equal an eager forward's, nothing moved,
and the audit is the version's. Rows go to ``results/engine-gpu.jsonl``, a trace of one sync beside decoding to
``results/trace-engine.json.gz``.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from launch.bench.decoder import DecodeLoop, Decoder
from launch.bench.entry import Parser, count, folder, require_cuda
from launch.bench.places import result_file
from launch.bench.report_receiver import LIVE_NBYTES
from launch.bench.rows import Row, RowWriter, Timed, middle
from launch.bench.serving import DENSITY, ServingRank
from launch.bench.trace import save_trace
from launch.bench.workload import Shape
from megasync.receiver.applier import Applier
from megasync.receiver.scatter_placed import ScatterPlaced

TRACE = "trace-engine.json.gz"
"""Beside the file of the rows."""

P1B_LIMIT = 1.6
"""What P1b may take, in scatter floors."""


@dataclass
class EngineBench:
    """What is measured.

    Attributes:
        syncs: Pauses that count; one more comes before them.
        every: Tokens from one sync to the next, where staging is not longer.
        tokens: Tokens without syncs.
        rows: Rows of a layer's matrices that the decoder takes.
        density: Changed bytes / all bytes.
    """

    syncs: int = 7
    every: int = 100
    tokens: int = 1000
    rows: int = 8192
    density: float = DENSITY


@dataclass
class Sync:
    """One sync of a decoding engine.

    Attributes:
        version: Taken.
        pause_s: End of the last token before to end of the first after.
        call_s: The applier's own figure: ``pause`` called to ``resume`` returned.
        stand_s: ``resume`` called to end of the first token after.
        stage_s: Staging, while tokens are made.
        first: Number of the first token after.
    """

    version: int
    pause_s: float
    call_s: float
    stand_s: float
    stage_s: float
    first: int


def one_sync(rank: ServingRank, applier: Applier, version: int) -> Sync:
    """Stage a version while tokens are made, and take it."""
    loop = rank.engine.loop
    assert loop is not None
    staged = applier.stage(version)
    assert staged is not None
    result = applier.update(version)
    assert result.versions == (version,)
    first = loop.first_after(rank.engine.resumed_at)
    ends = loop.ends
    return Sync(
        version,
        (ends[first] - ends[first - 1]) / 1e9,
        result.pause_s,
        (ends[first] - rank.engine.resumed_at) / 1e9,
        staged.stage_s,
        first,
    )


def check_tokens(loop: DecodeLoop, first: int) -> None:
    """The first tokens after a stand are what the live weights make of the tokens before it, eagerly. The loop stands.

    Raises:
        RuntimeError: They are not.
    """
    before, after = loop.around[first]
    decoder = loop.decoder
    made = decoder.forward(before.to(decoder.tokens.device)).argmax(1).cpu()
    if not torch.equal(made, after):
        raise RuntimeError(f"token {first} after a pause does not come from the live weights: {after} is not {made}")


def check_logits(decoder: Decoder, probe: torch.Tensor) -> torch.Tensor:
    """Logits of the captured graph for a probe, equal to those of an eager forward. The loop stands.

    Raises:
        RuntimeError: They are not equal.
    """
    replayed = decoder.logits_of(probe)
    if not torch.equal(replayed, decoder.forward(probe)):
        raise RuntimeError("logits of the replayed graph are not those of an eager forward on the live weights")
    return replayed


@contextmanager
def decoding(rank: ServingRank, rows: int) -> Iterator[DecodeLoop]:
    """A decode loop over the rank's live weights, warm."""
    decoder = Decoder(rank.engine.live, rank.shape, rows=rows)
    decoder.capture()
    loop = rank.engine.loop = DecodeLoop(decoder)
    loop.start()
    try:
        loop.wait(20)
        yield loop
    finally:
        loop.close()
        rank.engine.loop = None


def run(
    rank: ServingRank,
    config: EngineBench,
    writer: RowWriter,
    floor_of: Callable[[ScatterPlaced], float],
    trace: Path | None = None,
) -> list[Sync]:
    """Everything on one rank.

    Args:
        rank: At version 0.
        config: What is measured.
        writer: Gets the rows.
        floor_of: Seconds of the scatter floor for placed entries, measured now.
        trace: Where a trace goes; None for none.

    Returns:
        The syncs that count.
    """
    addresses = rank.addresses()
    applier = rank.applier()  # joins before there are versions that lead back to the same bytes
    rank.publish(config.syncs + 3, config.density)
    with decoding(rank, config.rows) as loop:
        probe = loop.decoder.tokens.clone()
        alone = loop.latencies(start := len(loop.ends), loop.wait(config.tokens, start))
        step_s = middle(alone)[0]
        one_sync(rank, applier, 1)  # makes arenas, compiles kernels
        start = len(loop.ends)
        syncs: list[Sync] = []
        for version in range(2, config.syncs + 2):
            loop.wait(config.every, syncs[-1].first if syncs else start)
            syncs.append(one_sync(rank, applier, version))
            print(f"version {version}: {syncs[-1]}", flush=True)
        beside = loop.latencies(start, loop.wait(config.every, syncs[-1].first))
        seen = []
        for version in (syncs[-1].version, syncs[-1].version + 1):  # there, and back: weights of both kinds
            if version > syncs[-1].version:
                one_sync(rank, applier, version)
            with loop.paused():
                for sync in syncs:
                    if (sync.version - version) % 2 == 0:
                        check_tokens(loop, sync.first)
                seen.append(check_logits(loop.decoder, probe))
        changed = float((seen[0] != seen[1]).float().mean())
        if changed < 0.5:
            raise RuntimeError(f"only {changed:.1%} of the logits changed with the weights")
        if trace is not None:
            save_trace(trace, lambda: one_sync(rank, applier, config.syncs + 3), loop)
    session = applier._session
    assert session is not None
    assert session.last is not None
    (placed,) = session.last.staged.placed
    assert isinstance(placed, ScatterPlaced)
    floor_s = floor_of(placed)
    if applier.audit().version != applier.version:
        raise RuntimeError("the audit found another version")
    assert session.ledger is not None
    rank.table = session.ledger.table
    if rank.addresses() != addresses:
        raise RuntimeError("a live weight moved")
    _write(rank, config, writer, syncs, alone, beside, step_s, floor_s, changed, loop.decoder.nbytes)
    applier.close()
    return syncs


def _write(
    rank: ServingRank,
    config: EngineBench,
    writer: RowWriter,
    syncs: list[Sync],
    alone: list[float],
    beside: list[float],
    step_s: float,
    floor_s: float,
    changed: float,
    read_nbytes: int,
) -> None:
    live = rank.world.live_nbytes
    size: Row = {
        "nbytes_in": 0,
        "nbytes_out": live,
        "density": config.density,
        "live_nbytes": live,
        "workers": rank.workers,
    }
    said = (
        f"{live / 1e9:.2f} GB live, {config.density:.3%} of bytes changed, greedy decoding of 32 sequences from a CUDA graph that "
        f"reads {read_nbytes / 1e9:.1f} GB of the live weights a token, {step_s * 1e3:.2f} ms alone; staged beside decoding "
        f"with the touched-old check, all proofs in the pause, the other ranks of the engine vote at once; floor: that step "
        f"+ {P1B_LIMIT} x the scatter floor of {floor_s * 1e3:.2f} ms of the same run; first tokens after each pause and "
        f"all logits equal an eager forward on the live bytes, {changed:.0%} of the logits changed"
    )
    target: Row = {"target_id": "P1c"} if live > 0.95 * LIVE_NBYTES else {}
    bound_s = step_s + P1B_LIMIT * floor_s
    for i, s in enumerate(syncs):
        writer.add(
            "P1c pause: last token before to first token after",
            sample=i,
            took=Timed(s.pause_s, 0.0),
            value=s.pause_s * 1e3,
            floor=bound_s * 1e3,
            said=said,
            step_s=step_s,
            scatter_floor_s=floor_s,
            call_s=s.call_s,
            first_token_s=s.stand_s,
            stage_s=s.stage_s,
            **target,
            **size,
        )
    for case, found in (("no syncs", alone), (f"a sync every {len(beside) // len(syncs)} tokens", beside)):
        _write_latency(writer, case, found, size)
    pause = middle(s.pause_s for s in syncs)[0]
    print(
        f"P1c {pause * 1e3:.3f} ms, bound {bound_s * 1e3:.3f} ms (step {step_s * 1e3:.3f}, scatter floor "
        f"{floor_s * 1e3:.3f}), pause call {middle(s.call_s for s in syncs)[0] * 1e3:.3f} ms, staging "
        f"{middle(s.stage_s for s in syncs)[0] * 1e3:.0f} ms",
        flush=True,
    )


def _write_latency(writer: RowWriter, case: str, found: list[float], size: Row) -> None:
    """One row with every sample."""
    names = ("p50", "p99", "p99.9", "max")
    figures = dict(zip(names, np.percentile(found, (50, 99, 99.9, 100)).tolist(), strict=True))
    columns: Row = {f"{name.replace('.', '_')}_s": round(v, 6) for name, v in figures.items()}
    writer.add(
        f"token latency, {case}",
        took=Timed(figures["p50"], 0.0),
        num=len(found),
        samples_us=[round(x * 1e6) for x in found],
        **columns,
        **size,
    )
    print(
        f"token latency, {case}: {len(found)} tokens, " + ", ".join(f"{n} {v * 1e3:.3f} ms" for n, v in figures.items())
    )


def scatter_floor(placed: ScatterPlaced) -> float:
    """See ``bench_receiver``: the same entries at ready-made addresses."""
    from launch.bench.bench_receiver import _floor

    with placed.queue.running():
        return _floor(placed)


def main() -> None:
    """Run all on one GPU."""
    parser = Parser(__doc__)
    parser.add_argument("--layers", type=count, default=78)
    parser.add_argument("--workers", type=count, default=16)
    parser.add_argument("--syncs", type=count, default=EngineBench.syncs)
    parser.add_argument("--every", type=count, default=EngineBench.every)
    parser.add_argument("--tokens", type=count, default=EngineBench.tokens)
    parser.add_argument("--quiet", action="store_true", help="stage beside the decoder, not as fast as can be")
    parser.add_argument("--directory", type=folder, default=Path("/dev/shm"), help="in which the sink is made")
    given = parser.parse_args()
    require_cuda()
    config = EngineBench(given.syncs, given.every, given.tokens)
    given.directory.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(dir=given.directory))
    try:
        rank = ServingRank(
            replace(Shape(), num_layers=given.layers), directory, "cuda", workers=given.workers, quiet=given.quiet
        )
        path = result_file(given.out, "engine-gpu.jsonl")
        with RowWriter(path, "engine") as writer:
            run(rank, config, writer, scatter_floor, path.with_name(TRACE))
        rank.close()
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
