"""Storage identity: where each live tensor was when it was bound, and whether it is still there.

An update writes through addresses that were proven at plan time, and engines hold on to them too (captured graphs,
kernel objects): a tensor that moved makes both wrong. Checked before every update, before any write.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

import torch

from megasync.errors import LiveMismatchError

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class StorageMark:
    """Everything that must stay as it was for a live tensor to be the same memory.

    Attributes:
        data_ptr: Address of the first element.
        storage_ptr: Address of the untyped storage.
        storage_nbytes: Bytes of the untyped storage.
        shape: Extents.
        stride: Strides in elements.
        storage_offset: First element, from the start of the storage.
        dtype: Dtype.
        device: Device.
    """

    data_ptr: int
    storage_ptr: int
    storage_nbytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> StorageMark:
        """The mark of a tensor as it is now."""
        storage = tensor.untyped_storage()
        return cls(
            tensor.data_ptr(),
            storage.data_ptr(),
            storage.nbytes(),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.device,
        )


def mark_all(tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> dict[str, StorageMark]:
    """Marks of the live tensors called ``names``."""
    return {name: StorageMark.of(tensors[name]) for name in names}


def check_alive(marks: Mapping[str, StorageMark], tensors: Mapping[str, torch.Tensor]) -> None:
    """Compare live tensors with their marks.

    Args:
        marks: From bind time.
        tensors: The live tensors as they are now.

    Raises:
        LiveMismatchError: Naming each tensor that is gone or moved, with both values. Nothing was touched. What the engine
            reads now was never looked at, so it is no known version until it is bound and audited again.
    """
    wrong: list[str] = []
    for name, mark in marks.items():
        tensor = tensors.get(name)
        if tensor is None:
            wrong.append(f"{name} is gone")
            continue
        now = StorageMark.of(tensor)
        if now == mark:
            continue
        changes = [
            f"{f.name} {getattr(mark, f.name)} -> {getattr(now, f.name)}"
            for f in fields(mark)
            if getattr(mark, f.name) != getattr(now, f.name)
        ]
        wrong.append(f"{name}: {', '.join(changes)}")
    if wrong:
        shown = "; ".join(wrong[:_SHOWN]) + (f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else "")
        raise LiveMismatchError(
            f"{len(wrong)} live tensors are not where they were bound ({shown}): nothing was touched. Keep weights in "
            "place, and join again"
        )
