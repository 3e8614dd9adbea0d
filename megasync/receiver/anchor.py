"""Anchors: full bytes of a version loaded over whatever is live, as XOR of live and anchor, so that undo works.

Every tile of this rank's slices becomes a mask; tiles that no frame lists are all zero. What the masks lead to is
compared with the anchor's own table of state digests before any write. Where masks of everything do not fit in memory,
``anchor_stream`` writes tiles as they come. At join somebody looks on while the anchor is read (``prior``), so that it is
read once for both. Comes after fetch, beside stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from time import perf_counter

import numpy as np

from megasync.digest import state_digest
from megasync.errors import BaseMismatchError, FormatError
from megasync.manifest import Manifest
from megasync.receiver.audit import audit
from megasync.receiver.backend import FetchedFrame, Placed, run_all
from megasync.receiver.bind import Binding
from megasync.receiver.dense import MaskPlaced, read_words, tile_words
from megasync.receiver.fetch import Fetched, fetch
from megasync.receiver.leads import Held
from megasync.receiver.ledger import Ledger
from megasync.receiver.stage import Proven, Staged
from megasync.receiver.sums import Sums
from megasync.receiver.tally import tally
from megasync.receiver.votes import together
from megasync.schema import names_of
from megasync.types import WORD_DTYPES, Lanes
from megasync.versions.publication import PublicationReader

Tile = tuple[int, int, Held, np.ndarray]
"""Tensor id, tile, the part of the tensor in it, and its words in the part's shape."""

See = Callable[[int, Held, np.ndarray, np.ndarray], None]
"""Is shown every tile: tensor id, the part of the tensor in it, what is live there and the anchor's words."""


def anchor_nbytes(binding: Binding) -> int:
    """Host bytes that a staged anchor takes on this rank: a mask and the words it replaces."""
    return 2 * binding.slice_nbytes()


def stage_anchor(
    binding: Binding,
    reader: PublicationReader,
    manifest: Manifest,
    pool: ThreadPoolExecutor | None,
    see: See | None = None,
) -> Staged:
    """Fetch an anchor and make masks of it against what is live now.

    Args:
        binding: This rank.
        reader: Of the run.
        manifest: The anchor.
        pool: Threads; None for the caller's.
        see: Is shown every tile.

    Raises:
        RefetchError, FormatError: Bytes were refused; nothing was touched.
    """
    started = perf_counter()
    fetched = Fetched()
    placed: list[Placed] = [mask_of(binding, tile, see) for tile in tiles_of(binding, reader, manifest, pool, fetched)]
    nbytes = sum(p.nbytes for p in placed)
    return Staged(manifest, tuple(placed), fetched, perf_counter() - started, nbytes)


def prove_anchor(
    binding: Binding,
    base: Ledger | None,
    reader: PublicationReader,
    staged: Staged,
    pool: ThreadPoolExecutor | None,
) -> Proven:
    """Prove that the masks lead to the anchor's state digests. *Collective*. Nothing live is written.

    Args:
        binding: This rank.
        base: What is held, None where it is unknown.
        reader: Of the run.
        staged: From ``stage_anchor``.
        pool: Threads; None for the caller's.

    Raises:
        FormatError: The anchor's bytes are not those of its table.
        BaseMismatchError: A frozen tensor, which no anchor carries, is not the run's.
    """
    manifest = staged.manifest
    table = together(binding.engine, f"table of version {manifest.version}", lambda: reader.state_table(manifest))
    ids = published(binding)

    def body() -> list[list[Sums]]:
        sums = run_all(pool, [p.prove for p in staged.placed])
        return [[before for before, _ in sums], [after for _, after in sums]]

    before, after = tally(binding, f"proof of anchor {manifest.version}", ids, body)
    if wrong := _differ(binding, ids, after, table):
        raise FormatError(
            f"anchor of version {manifest.version}: its bytes of {names_of(binding.schema, wrong)} do not have the state "
            "digests of its table; nothing was touched. Report the publisher, use another anchor"
        )
    check_frozen(binding, table, pool)
    return Proven(staged, base, Ledger(manifest, table), ids, before, after)


def published(binding: Binding) -> np.ndarray:
    """Tensors that the engine holds and anchors carry: int64 ids, ascending."""
    frozen = np.array([t.frozen for t in binding.schema.tensors], dtype=bool)
    return binding.group_ids[~frozen[binding.group_ids]]


def check_frozen(binding: Binding, table: np.ndarray, pool: ThreadPoolExecutor | None) -> None:
    """Compare frozen tensors, which no anchor carries, with its table of state digests. *Collective*.

    Raises:
        BaseMismatchError: They are not the run's; nothing was touched.
    """
    frozen = np.setdiff1d(binding.group_ids, published(binding))
    if len(frozen):
        found = audit(binding, pool, ids=frozen, derived=False)
        wrong = frozen[(found != table[frozen]).any(axis=1)]
        if len(wrong):
            raise BaseMismatchError(
                f"frozen tensors {names_of(binding.schema, wrong)} are not those of the run, and no publication carries "
                "them; nothing was touched. Load the engine from the run's checkpoint"
            )


def _differ(binding: Binding, ids: np.ndarray, lanes: np.ndarray, table: np.ndarray) -> list[int]:
    """Tensors whose digest sums do not make the table's state digests."""
    specs = binding.schema.tensors
    return [
        int(i)
        for i, (a, b) in zip(ids, lanes.tolist(), strict=True)
        if state_digest(specs[int(i)], Lanes(a, b)) != table[int(i)].tobytes()
    ]


def mask_of(binding: Binding, tile: Tile, see: See | None = None) -> MaskPlaced:
    """The mask of one tile against what is live now, shown to ``see``; not proven."""
    tensor_id, _, held, words = tile
    live = read_words(held.reading, binding.storages)
    if see is not None:
        see(tensor_id, held, live, words)
    return MaskPlaced(binding, tensor_id, held, words ^ live, whole=True)


def tiles_of(
    binding: Binding,
    reader: PublicationReader,
    manifest: Manifest,
    pool: ThreadPoolExecutor | None,
    fetched: Fetched,
) -> Iterator[Tile]:
    """Every tile of this rank's slices, once; parts of a tile from several frames are joined.

    Args:
        binding: This rank; ``Binding.only`` some tensors reads no others.
        reader: Of the run.
        manifest: The anchor.
        pool: Threads to fetch on, None for the caller's.
        fetched: Counts what was read.

    Yields:
        Tensor id, tile, the part of the tensor in it that this rank holds, and the anchor's words in the part's shape.
    """
    frames = binding.frames_of(manifest)
    _, ids, tiles = manifest.frames.touched
    mine = binding.needs(ids, tiles)
    places, parts = np.unique(
        np.stack((ids[mine].astype(np.int64), tiles[mine].astype(np.int64))), axis=1, return_counts=True
    )
    left = {(i, t): n for (i, t), n in zip(places.T.tolist(), parts.tolist(), strict=True)}
    listed = set(left)
    open_tiles: dict[tuple[int, int], Tile] = {}

    def consume(found: Sequence[FetchedFrame]) -> list[Tile]:
        out: list[Tile] = []
        for frame in found:
            entries = frame.entries()
            for t in np.flatnonzero(binding.needs(entries.tensor_ids, entries.tiles)).tolist():
                words = tile_words(binding, entries, t)
                if words is not None:
                    out.append((int(entries.tensor_ids[t]), int(entries.tiles[t]), *words))
        return out

    with closing(fetch(reader, binding.schema, manifest, frames, consume, pool, fetched=fetched)) as results:
        for batch in results:
            for tensor_id, tile, held, words in batch:
                key = (tensor_id, tile)
                if key in open_tiles:
                    words = open_tiles.pop(key)[3] ^ words
                left[key] -= 1
                if left[key]:
                    # Words are a view of the range that was read, which must not stay for as long as this tile waits.
                    open_tiles[key] = (tensor_id, tile, held, words.copy())
                else:
                    yield tensor_id, tile, held, words
    for tensor_id in published(binding).tolist():
        if tensor_id not in binding.held:
            continue
        held_all = binding.held[tensor_id]
        grid = binding.schema.grids[tensor_id]
        for tile in range(grid.num_tiles):
            if (tensor_id, tile) not in listed:
                part = held_all.clipped(grid.box(tile))
                if part is not None:
                    zeros = np.zeros(part.layout.slice_shape, WORD_DTYPES[part.layout.word_nbytes])
                    yield tensor_id, tile, part, zeros
