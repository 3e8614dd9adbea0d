"""Trainer adapter for plain torch: whole tensors on every rank (a single process, or DDP).

Every rank holds everything, so the ownership plan spreads the tiles over all of them. For sharded trainers write an
Exporter that gives boxes; ``adapters.megatron`` is one. Must not import receiver or another adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from megasync.errors import PlanError
from megasync.trainer.exporter import Exporter, Piece
from megasync.types import Box, TensorSpec
from megasync.versions.checkpoint import cut_of_name, layer_of_name

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}


class TensorExporter(Exporter):
    """Exports named tensors whole.

    Args:
        tensors: Canonical name to live tensor; tensors of equal storage, offset, shape and strides become one with
            aliases.
        layer_of: Layer of a name; by default the number after ``layers``, ``h`` or ``blocks``.
        volatile: Names that something other than the optimizer writes.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        layer_of: Callable[[str], int] = layer_of_name,
        volatile: Iterable[str] = (),
    ) -> None:
        self._layer_of, self._volatile = layer_of, frozenset(volatile)
        self._tensors: dict[str, torch.Tensor] = {}
        self._aliases: dict[str, list[str]] = {}
        seen: dict[tuple[object, ...], str] = {}
        for name, tensor in tensors.items():
            place = _place(tensor)
            if tensor.numel() and place in seen:
                self._aliases[seen[place]].append(name)
                continue
            seen[place] = name
            self._tensors[name] = tensor
            self._aliases[name] = []
        self._places = {name: _place(t) for name, t in self._tensors.items()}

    @classmethod
    def of_module(cls, module: torch.nn.Module, *, volatile: Iterable[str] = ()) -> TensorExporter:
        """Parameters and persistent buffers of a module under their state-dict names."""
        return cls(module.state_dict(keep_vars=True), volatile=volatile)

    def specs(self) -> list[TensorSpec]:
        """See ``Exporter.specs``."""
        unknown = [f"{n} ({t.dtype})" for n, t in self._tensors.items() if t.dtype not in DTYPE_NAMES]
        if unknown:
            raise PlanError(f"{len(unknown)} tensors have a dtype that safetensors does not know: {', '.join(unknown)}")
        return [
            TensorSpec(
                name,
                DTYPE_NAMES[t.dtype],
                tuple(t.shape),
                layer=self._layer_of(name),
                cut=cut_of_name(name),
                aliases=tuple(self._aliases[name]),
            )
            for name, t in self._tensors.items()
        ]

    def pieces(self) -> list[Piece]:
        """See ``Exporter.pieces``."""
        return [
            Piece(name, Box((0,) * t.dim(), tuple(t.shape)), t.detach(), name in self._volatile)
            for name, t in self._tensors.items()
        ]

    def check_alive(self) -> None:
        """See ``Exporter.check_alive``."""
        moved = [n for n, t in self._tensors.items() if _place(t) != self._places[n]]
        if moved:
            raise PlanError(
                f"{len(moved)} tensors moved since the plan was made ({', '.join(moved[:5])}): weights must be updated "
                f"in place; start the callback again after replacing them"
            )


def _place(t: torch.Tensor) -> tuple[object, ...]:
    return t.device, t.untyped_storage().data_ptr(), t.storage_offset(), tuple(t.shape), t.stride(), t.dtype
