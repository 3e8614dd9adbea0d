"""Live tensors as the layouts see them: untyped storages, and what must not change between planning and use.

Several live tensors may share a storage (tied weights, flat buffers, views); a storage goes by the name of its first
tensor and is listed once, so nothing is applied twice. Before it comes an engine's dictionary of live tensors; after
it `probe` and `plan`. This module must import nothing of megasync but ``errors``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megasync.errors import PlanError

Specs = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Canonical name to extents and torch dtype."""

LoadFn = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""What loads canonical tensors into an engine and returns its live tensors."""


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """What a plan knows of one live tensor.

    Attributes:
        name: Name in the engine.
        dtype: torch dtype name, without the prefix.
        shape: Extents in elements.
        stride: Strides in elements.
        offset: First element, from the start of the storage.
        storage: Name of the storage: that of the first tensor in it.
        storage_nbytes: Bytes of the whole storage.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: str
    storage_nbytes: int


def describe(live: Mapping[str, torch.Tensor]) -> tuple[LiveTensor, ...]:
    """Records the live tensors of an engine, in the order given.

    Args:
        live: Name to dense strided tensor, any dtype, any device, contiguous or not.

    Returns:
        One record per tensor.

    Raises:
        PlanError: A tensor is none of torch's, or has no readable storage (meta, sparse, quantised wrappers); all such
            names are listed.
    """
    alien = [
        f"{n!r} ({type(t).__name__})"
        for n, t in live.items()
        if not (isinstance(n, str) and isinstance(t, torch.Tensor))
    ]
    if alien:
        raise PlanError(f"live tensors must be torch tensors by name, found {', '.join(alien[:8])}")
    odd = [name for name, t in live.items() if not _is_plain(t)]
    if odd:
        raise PlanError(f"live tensors without a plain storage: {odd}; leave them out, or map what they wrap")
    owner: dict[tuple[str, int], str] = {}
    out = []
    for name, t in live.items():
        storage = t.untyped_storage()
        key = (str(t.device), storage.data_ptr())
        first = owner.setdefault(key, name) if storage.nbytes() else name
        out.append(
            LiveTensor(
                name,
                str(t.dtype).removeprefix("torch."),
                tuple(t.shape),
                tuple(t.stride()),
                int(t.storage_offset()),
                first,
                storage.nbytes(),
            )
        )
    return tuple(out)


def storages_of(live: Mapping[str, torch.Tensor], described: Sequence[LiveTensor]) -> dict[str, torch.Tensor]:
    """The storages under the live tensors as byte vectors.

    Args:
        live: The live tensors.
        described: What `describe` said of them.

    Returns:
        Storage name to uint8 ``[storage_nbytes]``, sharing memory with the live tensors. Memory: owned by the engine.
    """
    out: dict[str, torch.Tensor] = {}
    for record in described:
        if record.storage_nbytes and record.storage not in out:
            t = live[record.storage].detach()
            out[record.storage] = torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
    return out


def bound(
    live: Mapping[str, torch.Tensor], planned: Sequence[LiveTensor], needed: frozenset[str]
) -> dict[str, torch.Tensor]:
    """The storages that a plan needs, after checking that the live tensors are still those it was made for.

    Args:
        live: The live tensors now; more than the planned ones may be given.
        planned: The records of the plan.
        needed: Names of the storages that will be touched.

    Returns:
        Storage name to byte vector, as `storages_of`.

    Raises:
        PlanError: A planned tensor is missing or has another dtype, shape, stride, offset or storage; all are listed.
    """
    wanted = [r for r in planned if r.storage in needed]
    missing = [r.name for r in wanted if r.name not in live]
    if missing:
        raise PlanError(f"live tensors of the plan are missing: {missing}; nothing was touched, probe the engine again")
    now = describe({r.name: live[r.name] for r in wanted})
    changed = [f"{a.name}: planned {a}, found {b}" for a, b in zip(wanted, now, strict=True) if a != b]
    if changed:
        raise PlanError(
            "live tensors are not those of the plan, nothing was touched, probe the engine again: "
            + "; ".join(changed[:4])
        )
    return storages_of(live, now)


def snapshot(live: Mapping[str, torch.Tensor], described: Sequence[LiveTensor]) -> dict[str, np.ndarray]:
    """Copies the bytes of all storages to host memory.

    Args:
        live: The live tensors.
        described: What `describe` said of them.

    Returns:
        Storage name to uint8 ``[storage_nbytes]``.
    """
    return {name: s.to("cpu", copy=True).numpy() for name, s in storages_of(live, described).items()}


def seen_bytes(described: Sequence[LiveTensor]) -> dict[str, np.ndarray]:
    """Which bytes of each storage belong to an element of a live tensor.

    Args:
        described: Records of the live tensors.

    Returns:
        Storage name to bool ``[storage_nbytes]``; the rest is scratch that nobody reads through these tensors.
    """
    out: dict[str, torch.Tensor] = {}
    for r in described:
        if not r.storage_nbytes:
            continue
        mask = out.setdefault(r.storage, torch.zeros(r.storage_nbytes, dtype=torch.bool))
        size = getattr(torch, r.dtype).itemsize
        if all(r.shape):
            shape = (*r.shape, size)
            stride = (*(s * size for s in r.stride), 1)
            mask.as_strided(shape, stride, r.offset * size).fill_(True)
    return {name: mask.numpy() for name, mask in out.items()}


def _is_plain(t: torch.Tensor) -> bool:
    """Whether a tensor is elements at strides of memory; wrappers say so of themselves but have no memory."""
    if t.layout != torch.strided or t.device.type == "meta" or t.is_quantized:
        return False
    return not t.numel() or t.untyped_storage().data_ptr() != 0
