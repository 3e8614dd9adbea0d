"""What is live just before an anchor overwrites it: other weights, or the anchor's own words read through a wrong layout.

An anchor can be written through any layout that is one to one, and read back through it: its digests prove the words,
never the layout. Weights that the engine loaded by itself can: where they are the anchor's words in another order, the
layout is wrong, and writing would scramble weights that are right. Looks on, at join, while ``anchor`` reads the anchor,
and judges before it writes. Must import nothing above anchor.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import msgspec
import numpy as np

from megasync.digest import splitmix64
from megasync.errors import PlanError
from megasync.manifest import Manifest
from megasync.receiver.anchor import published
from megasync.receiver.bind import Binding
from megasync.receiver.leads import Held
from megasync.receiver.sums import Sums
from megasync.receiver.tally import tally
from megasync.receiver.votes import together, vote
from megasync.schema import names_of
from megasync.versions.publication import PublicationReader

ENOUGH_DISTINCT = 16
"""Different words among those out of place from which an equal multiset is evidence. Few words with few values (norms,
scales) can change places by chance between two versions; and all-equal words have no order."""

_MAX_SAMPLE = 1 << 14
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Words:
    """Order-independent sums of one tensor's words on this rank."""

    live: int = 0
    anchor: int = 0
    num_moved: int = 0
    distinct: set[int] = field(default_factory=set)


class Prior:
    """What is live before an anchor overwrites it, looked at while the anchor's bytes are read. *Collective*.

    The multiset of a tensor's live words is compared with the anchor's by the sum of a hash of each word modulo 2^64, over
    all ranks; so are tensors that may have been taken for one another, and those that share a storage. Whoever reads the
    anchor gives every tile to ``see``; nothing is read for this alone. Tensors whose state digests are the anchor's are
    left out.

    What it cannot tell: weights of another version than the anchor's, and tensors with less than `ENOUGH_DISTINCT`
    different words out of place.

    Args:
        binding: This rank.
        reader: Of the run.
        manifest: The anchor.
        found: uint8 ``[len(group_ids), 16]``, state digests of what is live (an audit's); None where they are not known.

    Attributes:
        ids: int64, ascending: published tensors that are not known to be the anchor's already.

    Raises:
        RefetchError, FormatError, RetryError: The anchor's table of state digests cannot be read, on every rank.
    """

    def __init__(
        self, binding: Binding, reader: PublicationReader, manifest: Manifest, found: np.ndarray | None
    ) -> None:
        self.binding, self.manifest = binding, manifest
        table = together(binding.engine, f"table of version {manifest.version}", lambda: reader.state_table(manifest))
        ids = published(binding)
        self._num_all = len(ids)
        if found is not None:
            at = np.searchsorted(binding.group_ids, ids)
            ids = ids[(found[at] != table[ids]).any(axis=1)]
        self.ids = ids
        # Shadows hold no live words.
        mine = [i for i in ids.tolist() if i in binding.held and i not in binding.shadows.layouts]
        self._words = {i: _Words() for i in mine}

    def see(self, tensor_id: int, held: Held, live: np.ndarray, words: np.ndarray) -> None:
        """Add one tile. Local; reads nothing.

        Args:
            tensor_id: Its tensor.
            held: The part of the tensor in it that this rank holds, replicas too.
            live: ``<u{w}`` in the part's shape, what is live there.
            words: The anchor's, alike.
        """
        w = self._words.get(tensor_id)
        if w is None:
            return
        here = held.here()
        one, two = (live.reshape(-1), words.reshape(-1)) if here is None else (live[here], words[here])
        if any(r.unit == "nibble" for r in held.layout.records):
            one, two = _nibbles(one), _nibbles(two)
        w.live += hash_sum(one)
        w.anchor += hash_sum(two)
        moved = one != two
        num_moved = int(np.count_nonzero(moved))
        w.num_moved += num_moved
        if len(w.distinct) < ENOUGH_DISTINCT:
            w.distinct.update(np.unique(one[moved][:: num_moved // _MAX_SAMPLE + 1])[:ENOUGH_DISTINCT].tolist())

    def require_order(self) -> None:
        """Refuse live words that are the anchor's in another order. *Collective*; every tile was seen, nothing was written.

        A warning says how many tensors matched and how many will be overwritten.

        Raises:
            PlanError: On every rank, naming the tensors; nothing was touched.
            BaseMismatchError: Live tensors are not where they were bound.
        """
        binding, manifest, ids = self.binding, self.manifest, self.ids
        what = f"weights that are live before anchor {manifest.version}"

        def body() -> list[list[Sums]]:
            binding.check_alive()
            return _columns(self._words) if len(ids) else [[], []]

        live, anchor = tally(binding, what, ids, body)
        differ = anchor[:, 1] > 0
        with vote(binding.engine, what) as ballot:
            ballot.data = msgspec.msgpack.encode(_neighbours(binding, set(ids[differ].tolist())))
        together_ids = [x for d in ballot.result for x in msgspec.msgpack.decode(d, type=list[list[int]])]
        rows = {int(i): k for k, i in enumerate(ids) if differ[k]}
        wrong = _exchanged(binding, rows, live, anchor) | _mixed(together_ids, rows, live, anchor)
        if wrong:
            raise PlanError(
                f"{binding.engine.name}: the live words of {names_of(binding.schema, sorted(wrong))} ({len(wrong)} tensors) "
                f"are those of version {manifest.version} in another order, or one another's: their layout is wrong (or the "
                "engine's load was), and the anchor would be written in that order. Nothing was touched: correct the "
                "adapter's layouts"
            )
        num_left = int(differ.sum())
        _log.warning(
            "run %r: %d of %d tensors of %s hold version %d already; its anchor overwrites the other %d",
            manifest.run,
            self._num_all - num_left,
            self._num_all,
            binding.engine.name,
            manifest.version,
            num_left,
        )


def _columns(found: Mapping[int, _Words]) -> list[list[Sums]]:
    """Live and anchor sums; beside them whether words out of place differ enough, and how many there are."""
    ids = np.array(sorted(found), dtype=np.int64)
    words = [found[int(i)] for i in ids]
    live = [(w.live % (1 << 64), int(len(w.distinct) >= ENOUGH_DISTINCT)) for w in words]
    anchor = [(w.anchor % (1 << 64), w.num_moved) for w in words]
    return [[Sums(ids, np.array(x, dtype=np.uint64).reshape(-1, 2))] for x in (live, anchor)]


def _exchanged(binding: Binding, rows: Mapping[int, int], live: np.ndarray, anchor: np.ndarray) -> set[int]:
    """Tensors that hold their own or one another's words: the largest set of one size whose live sums are its anchors'.

    A tensor that holds what another one's anchor is, is not enough: versions of tensors that began as copies do. What it
    holds must be missing elsewhere, and what it lacks must be held elsewhere.
    """
    by_size: dict[tuple[int, int], list[int]] = {}
    for i in rows:
        spec = binding.schema.tensors[i]
        by_size.setdefault((spec.word_nbytes, spec.num_words), []).append(i)
    out: set[int] = set()
    for ids in by_size.values():
        out |= {i for i in ids if live[rows[i], 0] == anchor[rows[i], 0] and live[rows[i], 1]}
        left, before = [i for i in ids if live[rows[i], 0] != anchor[rows[i], 0]], -1
        while len(left) != before:
            before = len(left)
            lives, anchors = ({int(x[rows[i], 0]) for i in left} for x in (live, anchor))
            left = [i for i in left if int(live[rows[i], 0]) in anchors and int(anchor[rows[i], 0]) in lives]
        if Counter(int(live[rows[i], 0]) for i in left) == Counter(int(anchor[rows[i], 0]) for i in left):
            out |= {i for i in left if live[rows[i], 1]}
    return out


def _mixed(groups: Iterable[Sequence[int]], rows: Mapping[int, int], live: np.ndarray, anchor: np.ndarray) -> set[int]:
    """Tensors of one storage whose words, taken together, are their anchors': one's words lie at the other's places."""
    out: set[int] = set()
    for group in _joined(groups):
        at = [rows[i] for i in group]
        a, b = live[at].sum(axis=0), anchor[at].sum(axis=0)
        if a[0] == b[0] and a[1]:
            out |= {i for i in group if live[rows[i], 1]}
    return out


def _neighbours(binding: Binding, ids: set[int]) -> list[list[int]]:
    """Tensors with words of one size in one live storage of this rank, where there are several."""
    found: dict[tuple[str, int], set[int]] = {}
    for i in ids & binding.held.keys() - binding.shadows.layouts.keys():
        for r in binding.held[i].layout.records:
            unit_nbytes = 0 if r.unit == "nibble" else r.word_nbytes
            found.setdefault((r.storage, unit_nbytes), set()).add(i)
    return [sorted(x) for x in found.values() if len(x) > 1]


def _joined(groups: Iterable[Sequence[int]]) -> list[list[int]]:
    """Groups with those that share a member made one."""
    leader: dict[int, int] = {}

    def of(i: int) -> int:
        while leader.setdefault(i, i) != i:
            leader[i] = leader[leader[i]]
            i = leader[i]
        return i

    for group in groups:
        for i in group[1:]:
            leader[of(i)] = of(group[0])
    out: dict[int, list[int]] = {}
    for i in sorted(leader):
        out.setdefault(of(i), []).append(i)
    return list(out.values())


def hash_sum(words: np.ndarray) -> int:
    """Sum of a hash of each word, whatever their order.

    Args:
        words: ``<u{w}`` ``[n]``.

    Returns:
        The sum modulo 2^64.
    """
    if words.itemsize <= 2:
        counts = np.bincount(words, minlength=1 << 8 * words.itemsize).astype(np.uint64)
        return int((counts * _hashes(words.itemsize)).sum(dtype=np.uint64))
    total = 0
    for at in range(0, len(words), _MAX_SAMPLE):
        total += int(splitmix64(words[at : at + _MAX_SAMPLE].astype(np.uint64)).sum(dtype=np.uint64))
    return total % (1 << 64)


@cache
def _hashes(word_nbytes: int) -> np.ndarray:
    return splitmix64(np.arange(1 << 8 * word_nbytes, dtype=np.uint64))


def _nibbles(words: np.ndarray) -> np.ndarray:
    raw = np.ascontiguousarray(words).view(np.uint8)
    return np.concatenate((raw & 15, raw >> 4))
