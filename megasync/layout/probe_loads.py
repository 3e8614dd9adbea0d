"""The loads of a probe: calls the loader, copies the live bytes, and keeps account of what changed.

Before it comes `probe`; it compares live bytes with layouts, and finds by bisection which canonical tensors a live
tensor is computed from. This module must import nothing of megasync but ``errors`` and ``layout``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from megasync.errors import PlanError
from megasync.layout.evaluate import gather, xor_
from megasync.layout.live import LiveTensor, LoadFn, Specs, describe, seen_bytes, snapshot
from megasync.layout.modes import Layout
from megasync.layout.probe_patterns import leveled_tensor


class Loads:
    """Runs a loader again and again over the same live tensors.

    Attributes:
        described: What the live tensors are; set by the first load.
        nbytes: Storage name to bytes; set by the first load.
    """

    def __init__(self, load_fn: LoadFn) -> None:
        self._load_fn = load_fn
        self._count = 0
        self._first: dict[str, np.ndarray] = {}
        self._changed: dict[str, np.ndarray] = {}
        self._seen: dict[str, np.ndarray] = {}
        self.described: tuple[LiveTensor, ...] = ()
        self.nbytes: dict[str, int] = {}

    def run(self, canonical: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
        """Loads canonical tensors and copies the live bytes.

        Args:
            canonical: Canonical name to CPU tensor; the loader gets copies, which it may keep or change.

        Returns:
            Storage name to uint8 ``[nbytes]``, host memory of the caller's own.

        Raises:
            PlanError: The loader raised, or its live tensors are not those of the first load.
        """
        self._count += 1
        try:
            live = dict(self._load_fn({name: t.clone() for name, t in canonical.items()}))
        except Exception as e:
            raise PlanError(
                f"probe: the loader failed on load {self._count}, of random or coded values: {type(e).__name__}: {e}"
            ) from e
        described = describe(live)
        storages = snapshot(live, described)
        if not self._first:
            self.described = described
            self.nbytes = {name: s.size for name, s in storages.items()}
            self._first = {name: s.copy() for name, s in storages.items()}
            self._changed = {name: np.zeros(s.size, dtype=np.bool_) for name, s in storages.items()}
            self._seen = seen_bytes(described)
        if described != self.described:
            odd = [b.name for a, b in zip(self.described, described, strict=False) if a != b]
            raise PlanError(
                f"probe: live tensors differ between loads ({odd[:8]}, or their number): they cannot be planned"
            )
        for name, s in storages.items():
            self._changed[name] |= s != self._first[name]
        return storages

    def readable(
        self, atoms: np.ndarray, offsets: np.ndarray, storage: str, itemsize: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Keeps the places that belong to live tensors.

        Args:
            atoms: int64 ``[n]``.
            offsets: int64 ``[n]``, in words of ``itemsize`` bytes, or nibbles where that is 0.
            storage: Name of the storage.
            itemsize: Bytes of a word, 0 for nibbles.

        Returns:
            Both arrays without places in scratch memory that no live tensor shows.
        """
        seen = self._seen[storage]
        if seen.all():
            return atoms, offsets
        keep = seen[offsets * itemsize] if itemsize else seen[offsets >> 1]
        for byte in range(1, itemsize):
            keep &= seen[offsets * itemsize + byte]
        return atoms[keep], offsets[keep]

    def changed_live(self, covered: Mapping[str, np.ndarray]) -> dict[str, tuple[str, np.ndarray]]:
        """Live tensors with bytes that changed over the loads although no layout covers them.

        Args:
            covered: Storage name to bool ``[nbytes]``.

        Returns:
            Live name to the name of its storage and the int64 offsets of such bytes.
        """
        out: dict[str, tuple[str, np.ndarray]] = {}
        for r in self.described:
            if not r.storage_nbytes:
                continue
            odd = self._changed[r.storage] & ~covered[r.storage]
            if odd.any():
                odd &= seen_bytes([replace(r, storage=r.name)])[r.name]
                if odd.any():
                    out[r.name] = (r.storage, np.flatnonzero(odd))
        return out


def covered_bytes(layouts: Mapping[str, Layout], nbytes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Which bytes of each storage the layouts write, at least in a nibble.

    Args:
        layouts: Canonical name to layout.
        nbytes: Storage name to bytes.

    Returns:
        Storage name to bool ``[nbytes]``.
    """
    flat = {name: torch.zeros(n, dtype=torch.uint8) for name, n in nbytes.items()}
    for layout in layouts.values():
        xor_(layout, flat, torch.full((layout.slice_nbytes,), 0xFF, dtype=torch.uint8))
    return {name: t.numpy() != 0 for name, t in flat.items()}


def mismatched(
    layouts: Mapping[str, Layout], storages: Mapping[str, np.ndarray], canonical: Mapping[str, torch.Tensor]
) -> list[str]:
    """Names whose live bytes, copies included, are not the canonical ones.

    Args:
        layouts: Canonical name to layout; no two share a place.
        storages: Storage name to live bytes after loading ``canonical``.
        canonical: Canonical name to tensor.

    Returns:
        The names, in the order of the layouts.
    """
    residual = {name: torch.from_numpy(s.copy()) for name, s in storages.items()}
    for name, layout in layouts.items():
        cut = canonical[name].reshape(layout.shape)
        cut = cut[tuple(slice(a, b) for a, b in zip(layout.start, layout.stop, strict=True))]
        xor_(layout, residual, cut.contiguous().reshape(-1).view(torch.uint8))
    out = []
    for name, layout in layouts.items():
        alone = (replace(layout, records=(replace(r, primary=True),), partial=True) for r in layout.records)
        if any(bool(gather(one, residual).any()) for one in alone):
            out.append(name)
    return out


def sources_of(
    loads: Loads, layouts: Mapping[str, Layout], specs: Specs, rng: np.random.Generator
) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """Finds which canonical tensors the unexplained live bytes depend on.

    Args:
        loads: The loads so far.
        layouts: What is explained.
        specs: Canonical tensors.
        rng: Source of random bytes.

    Returns:
        ``(computed, unstable)``: live name to the canonical names it is computed from, and the live names with bytes
        that differ between equal loads.
    """
    odd = loads.changed_live(covered_bytes(layouts, loads.nbytes))
    if not odd:
        return {}, ()
    middle = {n: leveled_tensor(*s, rng, 0.25, 0.75) for n, s in specs.items()}
    # A maximum notices only what is raised, a minimum only what is lowered, a cast any other value.
    others = [
        {n: leveled_tensor(*s, rng, low, high) for n, s in specs.items()}
        for low, high in ((0.25, 0.75), (0.9, 1.0), (0.0, 0.1))
    ]

    def load(changed: Sequence[str], other: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
        return loads.run({n: (other if n in changed else middle)[n] for n in specs})

    reference, again = load((), middle), load((), middle)
    unstable = []
    for live, (storage, at) in odd.items():
        noisy = reference[storage][at] != again[storage][at]
        if noisy.any():
            unstable.append(live)
        odd[live] = (storage, at[~noisy])
    computed: dict[str, set[str]] = {live: set() for live, (_, at) in odd.items() if at.size}

    def search(names: Sequence[str], suspects: frozenset[str], other: Mapping[str, torch.Tensor]) -> frozenset[str]:
        now = load(names, other)
        hit = frozenset(n for n in suspects if (now[odd[n][0]] != reference[odd[n][0]])[odd[n][1]].any())
        explained: frozenset[str] = frozenset()
        if hit and len(names) > 1:
            half = len(names) // 2
            explained = search(names[:half], hit, other) | search(names[half:], hit, other)
        for live in hit - explained:
            computed[live].update(names)
        return hit

    for other in others if computed else []:
        search(list(specs), frozenset(computed), other)
    settled = {n: tuple(sorted(s)) for n, s in computed.items() if s or n not in unstable}
    return settled, tuple(unstable)
