"""What else one could do to bring new weights to an engine, beside the scatter, on the same weights in the same run.

``python -m launch.bench.bench_peers`` on a GPU: a model-like list of some 22 GB with the article's share of its bytes changed,
old and new weights random. Every way takes its input from pinned host memory and leaves the new weights in place of the old:
a copy of all of them; CPU Zstd on 16 threads, upload and XOR; nvCOMP's SM decoders through the C interface and XOR; positions
and values by torch's ``index_put_``, with 32- and 64-bit positions; our scatter. The last two also with their input in HBM
already. Every way is checked once, bit for bit. With two GPUs, ``--nvlink`` sends 16 GiB from one to the other by NCCL. Rows go
to ``results/peers-gpu.jsonl`` and ``results/peers-nvlink-gpu.jsonl``; the table is made by ``report_peers``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from launch.bench.entry import Parser, count, require_cuda
from launch.bench.peers_dense import Zstd, nvcomp_way
from launch.bench.peers_nvlink import run_nvlink
from launch.bench.peers_weights import Change, Timer, Way, finish, pinned
from launch.bench.places import result_file
from launch.bench.rows import RowWriter, Timed, middle
from launch.bench.workload import Shape
from megasync.kernels.planes import Planes
from megasync.kernels.scatter import scatter_xor_
from megasync.kernels.scatter_stream import EntryRing, scatter_xor_streamed_

KINDS = ("scatter", "index_put", "copy", "zstd", "nvcomp")


@dataclass
class PeersBench:
    """What is measured.

    Attributes:
        layers: Layers of the model-like list on a TP4 rank: 17 make 22 GB.
        copied_nbytes: Weights that the copy brings; pinning memory takes a second for 2.4 GB.
        samples: Samples a way.
        threads: Of CPU Zstd.
        only: Kinds of ways.
    """

    layers: int = 17
    copied_nbytes: int = 6 << 30
    samples: int = 5
    threads: int = 16
    only: tuple[str, ...] = KINDS


def full_copy(change: Change, nbytes: int) -> Way:
    """New weights copied over old ones; of the list's beginning only."""
    nbytes = min(nbytes, len(change.arena))
    source = pinned(change.new[:nbytes])
    return Way(
        "full copy of the weights over PCIe",
        lambda: change.arena[:nbytes].copy_(source, non_blocking=True),
        moved_nbytes=nbytes,
        weights_nbytes=nbytes,
    )


def index_put(change: Change, dtype: torch.dtype, *, in_hbm: bool) -> Way:
    """Positions and new BF16 values, by storage, as tensors are sent by other frameworks; uploaded in two pieces."""
    targets: list[torch.Tensor] = []
    at: list[torch.Tensor] = []
    new: list[torch.Tensor] = []
    for begin, stop in change.spans:
        was, will = (x[begin:stop].view(torch.int16) for x in (change.old, change.new))
        found = torch.nonzero(was != will).reshape(-1)
        targets.append(change.arena[begin:stop].view(torch.bfloat16))
        at.append(found.to(dtype))
        new.append(will[found].view(torch.bfloat16))
    sizes = [len(x) for x in at]
    positions, values = torch.cat(at), torch.cat(new)
    moved = sum(x.numel() * x.element_size() for x in (positions, values))
    if not in_hbm:
        positions, values = pinned(positions), pinned(values)
    device = change.arena.device

    def work() -> None:
        where = positions.to(device, non_blocking=True).split(sizes)
        what = values.to(device, non_blocking=True).split(sizes)
        for target, p, v in zip(targets, where, what, strict=True):
            target.index_put_((p,), v)

    bits = 8 * dtype.itemsize
    place = "in HBM" if in_hbm else "pinned"
    return Way(f"positions ({bits} bit) + BF16 values, index_put_, {place}", work, moved_nbytes=moved)


def scatter(change: Change, *, in_hbm: bool) -> Way:
    """Our sparse entries: gaps and XOR values."""
    sizes = change.sizes
    moved = sum(s.planes.entries.numel() + s.plan.nbytes for s in sizes)
    if in_hbm:

        def work() -> None:
            for s in sizes:
                scatter_xor_(s.plan, s.planes)

        return Way("megasync: sparse entries, scatter, in HBM", work, moved_nbytes=moved)
    held = [
        Planes(s.planes.word_nbytes, s.planes.counts, *map(pinned, (s.planes.entries, s.planes.dense))) for s in sizes
    ]
    rings = [EntryRing(s.planes.word_nbytes, change.arena.device) for s in sizes]

    def streamed() -> None:
        for s, planes, ring in zip(sizes, held, rings, strict=True):
            scatter_xor_streamed_(s.plan, planes, ring)

    return Way("megasync: sparse entries, scatter, pinned", streamed, moved_nbytes=moved)


def measure(change: Change, way: Way, timer: Timer, writer: RowWriter, samples: int) -> float:
    """Check a way, then time it.

    Returns:
        Median, ms a GB of weights.

    Raises:
        RuntimeError: It does not make the new weights.
    """
    nbytes = way.weights_nbytes or change.nbytes
    change.reset()
    way.work()
    finish(change.arena)
    span = len(change.arena) if way.weights_nbytes is None else nbytes
    if not torch.equal(change.arena[:span], change.new[:span]) or torch.equal(change.arena[:span], change.old[:span]):
        raise RuntimeError(f"{way.name}: these are not the new weights")
    seconds = timer(way.work, change.reset, samples)
    for i, s in enumerate(seconds):
        writer.add(
            f"peer: {way.name}",
            nbytes_in=way.moved_nbytes,
            nbytes_out=nbytes,
            density=change.density,
            sample=i,
            took=Timed(s, 0.0),
            way=way.name,
            weights_nbytes=nbytes,
            moved_nbytes=way.moved_nbytes,
            checked="every bit",
            **way.more,
        )
    each = middle(seconds)[0] * 1e12 / nbytes
    print(f"{way.name:62s} {each:9.4f} ms/GB  {way.moved_nbytes / nbytes * 1e3:8.3f} MB moved a GB", flush=True)
    return each


def run(config: PeersBench, change: Change, writer: RowWriter) -> dict[str, float]:
    """All ways on one device; those that need a GPU are left out without one.

    Returns:
        Median ms a GB by way.
    """
    on_gpu = change.arena.is_cuda
    timer = Timer(change.arena.device)
    made: list[tuple[str, Callable[[], Way]]] = [
        ("scatter", lambda: scatter(change, in_hbm=True)),
        ("index_put", lambda: index_put(change, torch.int32, in_hbm=True)),
        ("index_put", lambda: index_put(change, torch.int64, in_hbm=True)),
        ("index_put", lambda: index_put(change, torch.int32, in_hbm=False)),
        ("index_put", lambda: index_put(change, torch.int64, in_hbm=False)),
        ("copy", lambda: full_copy(change, config.copied_nbytes)),
        ("zstd", lambda: Zstd(change, config.threads).way()),
    ]
    if on_gpu:
        made.insert(1, ("scatter", lambda: scatter(change, in_hbm=False)))
        made += [("nvcomp", lambda: nvcomp_way(change, "lz4")), ("nvcomp", lambda: nvcomp_way(change, "snappy"))]
    found = {}
    for kind, make in made:
        if kind not in config.only:
            continue
        way = make()
        found[way.name] = measure(change, way, timer, writer, config.samples)
        del way
        if on_gpu:
            torch.cuda.empty_cache()
    return found


def main() -> None:
    """Run on one GPU, or with ``--nvlink`` on two."""
    parser = Parser(__doc__)
    parser.add_argument("--layers", type=count, default=PeersBench.layers)
    parser.add_argument("--samples", type=count, default=PeersBench.samples)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--nvlink", action="store_true", help="only the copy between two GPUs")
    given = parser.parse_args()
    require_cuda(2 if given.nvlink else 1)
    if given.nvlink:
        run_nvlink(result_file(given.out, "peers-nvlink-gpu.jsonl"), 16 << 30)
        return
    torch.manual_seed(0)
    config = PeersBench(given.layers, samples=given.samples, only=tuple(given.only))
    change = Change(Shape(num_layers=config.layers), "cuda")
    with RowWriter(result_file(given.out, "peers-gpu.jsonl"), "peers") as writer:
        run(config, change, writer)


if __name__ == "__main__":
    main()
