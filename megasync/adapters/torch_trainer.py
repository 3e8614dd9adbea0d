"""Trainer adapter for plain torch: whole tensors on every rank (a single process, or DDP).

Every rank holds everything, so the ownership plan spreads the tiles over all of them. For sharded trainers write an
Exporter that gives boxes; ``adapters.megatron`` is one. Must not import receiver or another adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from megasync.adapters.arguments import listed, require_callable
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

    Only the tensors that were given are looked at: a trainer that puts another tensor in the place of one of them is not
    noticed, for nothing tells. ``of_module`` keeps the module and notices.

    Args:
        tensors: Canonical name to live tensor; tensors of equal storage, offset, shape and strides become one with
            aliases.
        layer_of: Layer of a name; by default the number after ``layers``, ``h`` or ``blocks``.
        volatile: Names that something other than the optimizer writes.

    Raises:
        TypeError: Something else than a mapping of names to plain torch tensors, or another argument of another kind.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        layer_of: Callable[[str], int] = layer_of_name,
        volatile: Iterable[str] = (),
    ) -> None:
        _check_tensors(tensors)
        require_callable("TensorExporter", "layer_of", layer_of)
        self._layer_of, self._volatile = layer_of, frozenset(listed("TensorExporter", "volatile", volatile))
        self._module: torch.nn.Module | None = None
        self._saved: dict[str, torch.Tensor] = {}
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
        self._places = [_place(t) for t in self._tensors.values()]

    @classmethod
    def of_module(cls, module: torch.nn.Module, *, volatile: Iterable[str] = ()) -> TensorExporter:
        """Parameters and persistent buffers of a module under their state-dict names.

        The module is kept: parameters that are replaced, added, tied or removed later end the publications with an error.

        Raises:
            TypeError: Not a module, or one with weights that are no plain tensors.
        """
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"TensorExporter.of_module got {type(module).__name__}, expected a torch.nn.Module")
        state = module.state_dict(keep_vars=True)
        # What get_extra_state() gives is no weight.
        found = cls({n: t for n, t in state.items() if isinstance(t, torch.Tensor)}, volatile=volatile)
        found._module, found._saved = module, _saved_tensors(module)
        return found

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
        """See ``Exporter.check_alive``; with ``of_module`` also that the module still has these tensors and no others."""
        moved = [n for (n, t), place in zip(self._tensors.items(), self._places, strict=True) if _place(t) != place]
        if self._module is not None:
            now, saved = _saved_tensors(self._module), self._saved
            if now.keys() != saved.keys():
                moved += [f"{n} was added" for n in now.keys() - saved.keys()]
                moved += [f"{n} is gone" for n in saved.keys() - now.keys()]
            moved += [
                f"{n} was replaced"
                for n, t in now.items()
                if (was := saved.get(n)) is not t and was is not None and _place(t) != _place(was)
            ]
        if moved:
            raise PlanError(
                f"{len(moved)} tensors moved since the plan was made ({', '.join(moved[:5])}): weights must be updated "
                f"in place; start the callback again with a new exporter after replacing them"
            )


def _check_tensors(tensors: object) -> None:
    if not isinstance(tensors, Mapping):
        raise TypeError(
            f"TensorExporter got {type(tensors).__name__}, expected a mapping of names to tensors: give "
            "model.state_dict(), or use TensorExporter.of_module(model)"
        )
    wrong = [f"{name!r} is {fault}" for name, t in tensors.items() if (fault := _fault(name, t))]
    if wrong:
        raise TypeError(
            f"TensorExporter takes plain torch tensors by name: {', '.join(wrong[:5])} ({len(wrong)} in all); an optimizer's "
            "state is none, and sparse or quantised tensors have no memory to read in place"
        )


def _fault(name: object, t: object) -> str:
    """What keeps a named tensor from being read in place; empty for a plain one."""
    if not isinstance(t, torch.Tensor):
        return f"of type {type(t).__name__}"
    if not isinstance(name, str):
        return "no name"
    return f"a quantised tensor ({t.dtype})" if t.is_quantized else "" if t.layout is torch.strided else str(t.layout)


def _saved_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, tied ones under each of their names; without the hooks of ``state_dict``,
    which take ten times as long."""
    found: dict[str, torch.Tensor] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        at = f"{prefix}." if prefix else ""
        for name, p in part._parameters.items():
            if p is not None:
                found[at + name] = p
        for name, b in part._buffers.items():
            if b is not None and name not in part._non_persistent_buffers_set:
                found[at + name] = b
    return found


def _place(t: torch.Tensor) -> tuple[object, ...]:
    """Where a tensor lies and how: what it shares with aliases, and what changes when it moves. Cheap, for every step end
    asks it of every tensor."""
    return t.device, t.data_ptr(), t.shape, t.stride(), t.dtype
