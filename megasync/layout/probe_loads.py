"""The loads of a probe: calls the loader, copies the live bytes, and keeps account of what changed.

Before it comes `probe`; it compares live bytes with layouts. After it `probe_sources`. This module must import nothing
of megasync but ``errors`` and ``layout``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from megasync.errors import PlanError
from megasync.layout.evaluate import gather, xor_
from megasync.layout.live import LiveTensor, LoadFn, Specs, describe, seen_bytes, snapshot, storages_of
from megasync.layout.modes import Layout
from megasync.layout.probe_draws import Draw
from megasync.layout.probe_patterns import dtype_name

POISON_NBYTES = 64 << 20
"""Most memory that is scribbled over before a load; larger storages are left alone."""


def checked_specs(specs: Specs) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Specs with plain extents and torch dtypes.

    Args:
        specs: Canonical name to extents and dtype; a dtype may go by its torch name, ``"bfloat16"``.

    Returns:
        The specs.

    Raises:
        TypeError: An entry is no pair of extents and a dtype.
        ValueError: An extent is negative, or the dtype is unknown or cannot be probed.
    """
    out = {}
    for name, spec in specs.items():
        try:
            shape, dtype = spec
            shape = tuple(int(n) for n in shape)
        except (TypeError, ValueError) as e:
            raise TypeError(f"the spec of {name!r} is {spec!r}; expected (extents, torch dtype)") from e
        if isinstance(dtype, str):
            found = getattr(torch, dtype.removeprefix("torch."), None)
            if not isinstance(found, torch.dtype):
                raise ValueError(
                    f"the spec of {name!r} names the dtype {dtype!r}; expected a torch one, like 'bfloat16'"
                )
            dtype = found
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"the spec of {name!r} has the dtype {dtype!r}; expected a torch.dtype")
        if any(n < 0 for n in shape):
            raise ValueError(f"the spec of {name!r} has the extents {shape}")
        dtype_name(dtype)
        out[name] = (shape, dtype)
    return out


class Loads:
    """Runs a loader again and again over the same live tensors.

    Attributes:
        described: What the live tensors are; set by the first load.
        nbytes: Storage name to bytes; set by the first load.
    """

    def __init__(self, load_fn: LoadFn) -> None:
        self._load_fn = load_fn
        self._count = 0
        self._accepted: Mapping[str, torch.Tensor] = {}
        self._first_canonical: dict[str, torch.Tensor] = {}
        self._first: dict[str, np.ndarray] = {}
        self._changed: dict[str, np.ndarray] = {}
        self._seen: dict[str, np.ndarray] = {}
        self._memory: list[tuple[torch.device, int]] = []
        self.described: tuple[LiveTensor, ...] = ()
        self.nbytes: dict[str, int] = {}

    def run(self, canonical: Mapping[str, torch.Tensor], kind: str = "coded values") -> dict[str, np.ndarray]:
        """Loads canonical tensors and copies the live bytes.

        Args:
            canonical: Canonical name to CPU tensor; the loader gets copies, which it may keep or change.
            kind: What they hold, for the message of a loader that fails.

        Returns:
            Storage name to uint8 ``[nbytes]``, host memory of the caller's own.

        Raises:
            PlanError: The loader raised, returned something else than tensors by name, or its live tensors are not
                those of the first load.
        """
        self._count += 1
        self._poison()
        try:
            live = self._load_fn({name: t.clone() for name, t in canonical.items()})
        except Exception as e:
            raise PlanError(
                f"probe: the loader failed on load {self._count}, of {kind}: {type(e).__name__}: {e}"
                f"{self._refused(canonical)}"
            ) from e
        if not isinstance(live, Mapping):
            raise PlanError(f"probe: the loader returned {type(live).__name__}; expected live tensors by name, a dict")
        live = dict(live)
        described = describe(live)
        storages = snapshot(live, described)
        if not self._accepted:
            self.described = described
            self.nbytes = {name: s.size for name, s in storages.items()}
            self._first_canonical = dict(canonical)
            self._first = {name: s.copy() for name, s in storages.items()}
            self._changed = {name: np.zeros(s.size, dtype=np.bool_) for name, s in storages.items()}
            self._seen = seen_bytes(described)
        if described != self.described:
            odd = [b.name for a, b in zip(self.described, described, strict=False) if a != b]
            raise PlanError(
                f"probe: live tensors differ between loads ({odd[:8]}, or their number): they cannot be planned"
            )
        self._accepted = canonical
        if not self._memory:
            self._memory = [(s.device, s.numel()) for s in storages_of(live, described).values()]
        for name, s in storages.items():
            self._changed[name] |= s != self._first[name]
        return storages

    def draw(self, draw: Draw) -> dict[str, np.ndarray]:
        """Loads a draw; as `run`."""
        return self.run(draw.tensors, draw.kind)

    def first_again(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Makes the first load again.

        Returns:
            What it gave the first time, and now.
        """
        return self._first, self.run(self._first_canonical)

    def _poison(self) -> None:
        """Leaves other bytes behind in free memory at every load, so that padding which nobody initialises shows."""
        held, budget = [], POISON_NBYTES
        for device, nbytes in self._memory:
            if nbytes <= budget:
                budget -= nbytes
                held.append(torch.full((nbytes,), self._count * 37 % 251 + 1, dtype=torch.uint8, device=device))

    def _refused(self, canonical: Mapping[str, torch.Tensor]) -> str:
        """Which tensor the loader refuses, found by giving it fewer and fewer of those that it failed on."""
        if not self._accepted:
            return ""
        names = list(canonical)

        def takes(num_new: int) -> bool:
            chosen = {n: (canonical if i < num_new else self._accepted)[n] for i, n in enumerate(names)}
            try:
                self._load_fn({n: t.clone() for n, t in chosen.items()})
            except Exception:
                return False
            return True

        if takes(len(names)) or not takes(0):
            return ". It did otherwise with the same tensors when called again, so no value of them is at fault"
        low, high = 0, len(names)  # the first `low` are taken, the first `high` are not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if takes(middle) else (low, middle)
        return (
            f". It refuses what {names[low]!r} holds: {_span(canonical[names[low]])}. Give the range of values that it "
            "takes (values=), or any_bytes=False if it takes all finite ones; the plan is exact for such values alone"
        )

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


def _span(tensor: torch.Tensor) -> str:
    """The values of a tensor in few words."""
    if not tensor.is_floating_point() or dtype_name(tensor.dtype) == "float4_e2m1fn_x2":
        return f"{tensor.dtype} {tuple(tensor.shape)}"
    values = tensor.reshape(-1).to(torch.float64)
    finite = values[values.isfinite()]
    some = f"values from {float(finite.min())} to {float(finite.max())}" if finite.numel() else "no finite value"
    return some + (", NaN or infinities among them" if finite.numel() < values.numel() else "")


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
) -> dict[str, tuple[int, ...]]:
    """Names whose live bytes, copies included, are not the canonical ones.

    Args:
        layouts: Canonical name to layout; no two share a place.
        storages: Storage name to live bytes after loading ``canonical``.
        canonical: Canonical name to tensor.

    Returns:
        The names, in the order of the layouts, with the records that are wrong, by number.
    """
    needed = {s for layout in layouts.values() for s in layout.storages}
    residual = {name: torch.from_numpy(storages[name].copy()) for name in needed}
    for name, layout in layouts.items():
        cut = canonical[name].reshape(layout.shape)
        cut = cut[tuple(slice(a, b) for a, b in zip(layout.start, layout.stop, strict=True))]
        xor_(layout, residual, cut.contiguous().reshape(-1).view(torch.uint8))
    # Mostly nothing is left at all, and then no place needs a look.
    rests = {name for name, s in residual.items() if s.any()}
    out = {}
    for name, layout in layouts.items():
        if rests.isdisjoint(layout.storages):
            continue
        alone = (replace(layout, records=(replace(r, primary=True),), partial=True) for r in layout.records)
        wrong = tuple(i for i, one in enumerate(alone) if bool(gather(one, residual).any()))
        if wrong:
            out[name] = wrong
    return out
