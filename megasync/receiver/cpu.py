"""The CPU backend: numpy gathers and scatters through the layouts. The reference for every other backend.

Frames with few changed words become runs of offsets; frames in which most words change become masks of whole tiles
(``dense``), which take less memory then. Comes between fetch and apply. Must not import a kernel that needs a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megasync.errors import LiveMismatchError
from megasync.receiver.backend import Backend, FetchedFrame, Placed
from megasync.receiver.bind import Binding
from megasync.receiver.dense import mask_placed
from megasync.receiver.kinds import Kinds, kinds_of
from megasync.receiver.place import place_run
from megasync.receiver.runs import Run
from megasync.receiver.sums import CHUNK, Sums
from megasync.receiver.together import decode_together
from megasync.types import Entries

MASK_DENSITY = 0.125
"""Changed words from which a mask of the tile takes less memory than an offset, a position and two values a word."""

DECODED_CHANGED = 1 << 19
"""Changed words that are decoded together: all of a range of frames, so that each kind fills several workspaces."""

PLACED_CHANGED = 1 << 17
"""Changed words from which they are written apart from others: few enough that threads share the write."""


class CpuPlaced(Placed):
    """Runs of changed words, and live memory as numpy words."""

    def __init__(self, binding: Binding, names: tuple[str, ...], runs: Sequence[Run]) -> None:
        self.binding = binding
        self.names = names
        self.runs = tuple(runs)
        self.shared = any(p.nibble is not None for r in runs for p in r.parts)
        self.num_changed = sum(len(r.values) for r in runs)
        self.nbytes = sum(r.nbytes for r in runs)
        self._sums: tuple[Sums, Sums] | None = None

    def _words(self, storage: int, word_nbytes: int) -> np.ndarray:
        return self.binding.words(self.names[storage], word_nbytes)

    def prove(self) -> tuple[Sums, Sums]:
        """See ``Placed.prove``; the words read are kept, as what undo restores."""
        before: list[Sums] = []
        after: list[Sums] = []
        for run in self.runs:
            old = run.gather(self._words)
            if len(run.parts) > 1:
                self._check_copies(run, old)
            run.old = old
            was, will_be = run.sums(old, old ^ run.values)
            before.append(was)
            after.append(will_be)
        self._sums = Sums.join(before), Sums.join(after)
        return self._sums

    def _check_copies(self, run: Run, old: np.ndarray) -> None:
        at = run.first_difference(self._words, old)
        if at is not None:
            tensor = int(run.ids[int(np.searchsorted(run.bounds, at, side="right")) - 1])
            raise LiveMismatchError(
                f"{self.binding.schema.tensors[tensor].name}: word {int(run.flat[at])} differs between the engine's copies "
                "of it; nothing was touched. Load the weights anew, or correct the adapter's list of copies"
            )

    def xor_(self) -> None:
        """See ``Placed.xor_``."""
        for run in self.runs:
            assert run.old is not None, "prove() comes before xor_()"
            run.xor_(self._words)

    def write_(self) -> Sums:
        """See ``Placed.write_``: each run is compared while its lines are still in the cache."""
        written = True
        for run in self.runs:
            assert run.old is not None, "prove() comes before write_()"
            run.xor_(self._words)
            written = self._is_written(run) and written
        if written and self._sums is not None:
            return self._sums[1]
        return self.read_back()

    def read_back(self) -> Sums:
        """See ``Placed.read_back``.

        Live words that equal ``old ^ value``, of which ``prove`` made the sums, need no sums of their own: comparing
        them is both cheaper and stricter.
        """
        if self._sums is not None and all(self._is_written(run) for run in self.runs):
            return self._sums[1]
        return Sums.join(run.sums(run.gather(self._words))[0] for run in self.runs)

    def _is_written(self, run: Run) -> bool:
        return run.old is not None and run.first_difference(self._words, run.old ^ run.values) is None

    def undo_(self) -> None:
        """See ``Placed.undo_``: the words that ``prove`` read are written, so it does not matter where a write
        stopped."""
        for run in self.runs:
            if run.old is not None:
                run.write_(self._words, run.old)


class CpuBackend(Backend):
    """Places frames for an engine rank whose weights are in host memory.

    Raises:
        ValueError: A live storage is not.
    """

    name = "cpu"

    def __init__(self, binding: Binding) -> None:
        if others := {d for d in binding.devices if d.type != "cpu"}:
            raise ValueError(f"the cpu backend needs weights in host memory, found them on {sorted(map(str, others))}")
        self.binding = binding
        self.kinds: Kinds = kinds_of(binding)

    def place(self, frames: Sequence[FetchedFrame]) -> list[Placed]:
        """See ``Backend.place``."""
        out: list[Placed] = []
        pending: dict[int, list[FetchedFrame]] = {}
        for frame, num_words in zip(frames, _words_of(frames), strict=True):
            record = frame.record
            if record.num_changed >= MASK_DENSITY * num_words:
                out += mask_placed(self.binding, frame.entries())
                continue
            group = pending.setdefault(record.word_nbytes, [])
            group.append(frame)
            if sum(f.record.num_changed for f in group) >= DECODED_CHANGED:
                out += self._placed(decode_together(pending.pop(record.word_nbytes)))
        for group in pending.values():
            out += self._placed(decode_together(group))
        return out

    def _placed(self, parts: Sequence[Entries]) -> Iterator[Placed]:
        runs: list[Run] = []
        for run in self._runs(parts):
            runs.append(run)
            if sum(len(r.values) for r in runs) >= PLACED_CHANGED:
                yield CpuPlaced(self.binding, self.kinds.names, runs)
                runs = []
        if runs:
            yield CpuPlaced(self.binding, self.kinds.names, runs)

    def _runs(self, parts: Sequence[Entries]) -> Iterator[Run]:
        """Tiles of all frames, those of one kind together, cut where a workspace is full."""
        ids = _joined([e.tensor_ids for e in parts]).astype(np.int64)
        tiles = _joined([e.tiles for e in parts])
        counts = _joined([e.counts for e in parts]).astype(np.int64)
        positions = _joined([e.positions for e in parts])
        values = _joined([e.values for e in parts])
        last = np.cumsum(counts)
        first = last - counts
        kind = np.where(self.binding.needs(ids, tiles), self.kinds.of[ids], -1)
        order = np.argsort(kind, kind="stable")
        order = order[np.searchsorted(kind[order], 0) :]
        for chosen in _chunks(order, kind, counts):
            # Tiles that follow on one another are one piece of the words.
            edges = np.flatnonzero(chosen[1:] != chosen[:-1] + 1)
            starts, stops = first[chosen[[0, *(edges + 1)]]], last[chosen[[*edges, -1]]]
            spans = [slice(a, b) for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]
            run = place_run(
                self.kinds,
                int(kind[chosen[0]]),
                ids[chosen],
                tiles[chosen],
                counts[chosen],
                _joined([positions[s] for s in spans]),
                _joined([values[s] for s in spans]),
            )
            if run is not None:
                yield run


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _words_of(frames: Sequence[FetchedFrame]) -> list[int]:
    """Words of the touched tiles of each frame, changed or not."""
    if not frames:
        return []
    num = np.array([len(f.record.tiles) for f in frames])
    ids, tiles = (_joined([getattr(f.record, name) for f in frames]) for name in ("tensor_ids", "tiles"))
    words = frames[0].schema.tile_words(ids, tiles)
    return np.add.reduceat(words, np.cumsum(num) - num, dtype=np.int64).tolist()  # type: ignore[no-any-return]


def _chunks(order: np.ndarray, kind: np.ndarray, counts: np.ndarray) -> Iterator[np.ndarray]:
    """Consecutive tiles of one kind, whose changed words fill a workspace of ``CHUNK`` and rarely pass it."""
    reached = np.cumsum(counts[order])
    most = int(counts[order].max(initial=0))  # by so much a chunk may pass the size by which it is counted
    number = (reached - 1) // max(CHUNK - most, CHUNK >> 1)
    starts = np.ones(len(order), dtype=bool)
    starts[1:] = (kind[order][1:] != kind[order][:-1]) | (number[1:] != number[:-1])
    yield from np.split(order, np.flatnonzero(starts)[1:]) if len(order) else ()
