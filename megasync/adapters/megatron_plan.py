"""Plans the export of Megatron chunks: every leaf to boxes of canonical tensors, every complaint in one error.

Runs once, at plan time, between megatron_leaves.py (what a chunk holds) and megatron.py (the Exporter). Pure but for
reading the modules: no copies, no communication. Must not import receiver or Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megasync.adapters.megatron_leaves import ChunkMemory, Leaf, Owner, read_leaves, unsupported
from megasync.adapters.megatron_rows import split_rows
from megasync.adapters.megatron_stored import StandIns, stored_weight
from megasync.adapters.names import NameTable, Target, take_apart
from megasync.adapters.transformer_engine import StoredWeight, codes_of, storage_of
from megasync.errors import PlanError
from megasync.trainer.exporter import Piece
from megasync.types import Box, TensorSpec

_MAX_LISTED = 200  # unmapped leaves that are named one by one

_DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class Anchorage:
    """Where a live tensor was when the views over it were made.

    Attributes:
        chunk: Index of its chunk.
        name: Its name in the chunk.
        address: First byte.
        shape: Extents.
        stride: Strides, in elements.
        dtype: Its torch dtype.
    """

    chunk: int
    name: str
    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(chunk: int, name: str, tensor: torch.Tensor) -> Anchorage:
        """Where a tensor is now: its codes, where it is kept quantised."""
        codes = codes_of(tensor) if storage_of(tensor) is not None else None
        tensor = tensor if codes is None else codes
        return Anchorage(chunk, name, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """What a rank exports.

    Attributes:
        specs: Canonical tensors by name.
        pieces: Views of live memory, in chunk and leaf order.
        stored: Regions of parameters that are kept quantised, in the same order; neither in ``specs`` nor ``pieces``.
        anchorages: The live tensors under them.
    """

    specs: dict[str, TensorSpec]
    pieces: list[Piece]
    stored: list[StoredWeight]
    anchorages: list[Anchorage]


def plan_export(
    chunks: Sequence[Any],
    models: Sequence[Any],
    names: NameTable,
    vocab_size: int | None,
    metadata: Mapping[str, Any],
) -> ExportPlan:
    """Map every leaf of all chunks.

    Args:
        chunks: Model chunks, wrapped.
        models: The same chunks, unwrapped.
        names: Naming table.
        vocab_size: Vocabulary rows of the checkpoint, None when unknown.
        metadata: For ``sharded_state_dict``.

    Returns:
        The plan.

    Raises:
        PlanError: Listing everything that cannot be exported.
    """
    return _Planning(names, vocab_size).run(chunks, models, metadata)


class _Planning:
    """Maps all leaves once and collects every complaint, so that one error names them all."""

    def __init__(self, names: NameTable, vocab_size: int | None) -> None:
        self.names = names
        self.vocab_size = vocab_size
        self.specs: dict[str, TensorSpec] = {}
        self.pieces: dict[tuple[str, Box], Piece] = {}
        self.stored: dict[tuple[str, Box], StoredWeight] = {}
        self.anchorages: dict[tuple[int, str], Anchorage] = {}
        self.unmapped: dict[str, list[str]] = {}
        self.refused: list[str] = []

    def run(self, chunks: Sequence[Any], models: Sequence[Any], metadata: Mapping[str, Any]) -> ExportPlan:
        for number, (chunk, model) in enumerate(zip(chunks, models, strict=True)):
            problems = unsupported(chunk, model, self.names.keep_global_names)
            self.refused += [p for p in problems if p not in self.refused]
            if not problems:
                self._chunk(number, model, metadata)
        complaints: list[str] = []
        if self.unmapped:
            num_leaves = sum(len(names) for names in self.unmapped.values())
            # A whole family without rules has tens of thousands of leaves: then one line a pattern says more.
            listed = [
                f"{pattern} ({len(names)} leaves)" if num_leaves > _MAX_LISTED else ", ".join(names)
                for pattern, names in self.unmapped.items()
            ]
            complaints.append(
                f"{num_leaves} leaves that table {self.names.name!r} does not map (add rules with "
                f"NameTable.extended, or a rule without names to leave one out): {', '.join(listed)}"
            )
        if self.refused:
            complaints.append(f"{len(self.refused)} things that cannot be exported: {'; '.join(self.refused)}")
        if complaints:
            raise PlanError("the Megatron export cannot be planned: " + "; ".join(complaints))
        return ExportPlan(
            self.specs, list(self.pieces.values()), list(self.stored.values()), list(self.anchorages.values())
        )

    def _chunk(self, number: int, model: Any, metadata: Mapping[str, Any]) -> None:
        stand_ins = StandIns(model)
        leaves, refused = read_leaves(model, metadata, stand_ins)
        # After the leaves: asking for them makes a router turn its expert bias back to FP32, in new memory.
        memory = ChunkMemory(model, stand_ins)
        self.refused += list(dict.fromkeys([*memory.refused, *refused]))
        config = model.config
        aliases = self.names.aliases(
            config.num_layers,
            getattr(config, "mtp_num_layers", None) or 0,
            bool(getattr(model, "share_embeddings_and_output_weights", False)),
        )
        for leaf in leaves:
            key = take_apart(leaf.key, leaf.axes)
            target = None if key is None else self.names.find(key, config.num_layers)
            if target is None:
                named = leaf.key if leaf.key == leaf.name else f"{leaf.key} (here {leaf.name})"
                self.unmapped.setdefault(key.pattern if key else leaf.key, []).append(named)
            if not leaf.data.numel():
                continue
            owner = memory.claim(leaf.data)
            if owner is None:
                self.refused.append(f"{leaf.name}: its leaf is a copy, not the memory of a parameter or buffer")
            elif target is not None and target.names:
                self._leaf(number, leaf, owner, target, config, aliases)
        self.refused += [f"{name}: bytes that no leaf covers" for name in memory.uncovered()]

    def _leaf(
        self,
        chunk: int,
        leaf: Leaf,
        owner: Owner,
        target: Target,
        config: Any,
        aliases: Mapping[str, tuple[str, ...]],
    ) -> None:
        dtype = _DTYPES.get(leaf.data.dtype)
        is_norm = leaf.key.endswith(("layer_norm_weight", "layernorm.weight", "norm.weight"))
        if dtype is None:
            self.refused.append(f"{leaf.name}: dtype {leaf.data.dtype} has no checkpoint form")
            return
        if is_norm and getattr(config, "layernorm_zero_centered_gamma", False) and not self.names.zero_centered_norms:
            self.refused.append(
                f"{leaf.name}: holds the norm weight minus one, which table {self.names.name!r} does not"
            )
            return
        # A scalar has one row, like a vector of one.
        start, shape = leaf.start or (0,), leaf.shape or (1,)
        try:
            if target.rows == "latent":
                start, shape = _latent(leaf, start, shape, config)
            split = split_rows(target.rows, shape[0], len(target.names), config, self.vocab_size)
        except ValueError as e:
            self.refused.append(f"{leaf.name}: {e}")
            return
        anchor = owner.tensor if owner.stored is None else owner.stored
        self.anchorages[chunk, owner.name] = Anchorage.of(chunk, owner.name, anchor)
        for span in split.spans(start[0], leaf.data.shape[0] if leaf.data.dim() else 1):
            name = target.names[span.part]
            extents = (split.totals[span.part], *shape[1:]) if leaf.shape else ()
            if owner.stored is not None:
                box = Box((span.start, *start[1:]), (span.count, *leaf.data.shape[1:]))
                self._stored(chunk, leaf, owner, target, name, span.local, extents, box, aliases.get(name, ()))
                continue
            spec = TensorSpec(name, dtype, extents, target.layer, target.cut, aliases=aliases.get(name, ()))
            if self.specs.setdefault(name, spec) != spec:
                self.refused.append(f"{leaf.name}: {name} is {spec} here, but {self.specs[name]} in another leaf")
                continue
            view = leaf.data.narrow(0, span.local, span.count) if leaf.shape else leaf.data
            box = Box((span.start, *start[1:]) if leaf.shape else (), tuple(view.shape))
            piece = Piece(name, box, view, volatile=not owner.is_parameter, chunk=chunk)
            first = self.pieces.setdefault((name, box), piece)
            if first.data.data_ptr() != view.data_ptr():
                self.refused.append(f"{leaf.name}: this rank holds {name} {box} twice, in different memory")

    def _stored(
        self,
        chunk: int,
        leaf: Leaf,
        owner: Owner,
        target: Target,
        name: str,
        local: int,
        extents: tuple[int, ...],
        box: Box,
        aliases: tuple[str, ...],
    ) -> None:
        """Rows of a leaf of a quantised parameter, whose data is a view of the stand-in."""
        if aliases:
            self.refused.append(f"{leaf.name}: {name} is tied to {', '.join(aliases)}: keep tied weights unquantised")
            return
        view = leaf.data.narrow(0, local, box.extent[0])
        try:
            record = stored_weight(
                name,
                owner.stored,
                owner.tensor,
                view,
                extents,
                box,
                layer=target.layer,
                cut=target.cut,
                chunk=chunk,
            )
        except ValueError as e:
            self.refused.append(f"{leaf.name}: {e}")
            return
        first = self.stored.setdefault((name, box), record)
        if first.param is not record.param or first.local != record.local:
            self.refused.append(f"{leaf.name}: this rank holds {name} {box} twice, in different memory")


def _latent(
    leaf: Leaf, start: tuple[int, ...], shape: tuple[int, ...], config: Any
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Place of an MLA down projection.

    Megatron 0.19 splits a fused one into leaves that claim a tensor-parallel shard each, although every rank holds all
    rows when the layer is duplicated; its own loader then repeats the rows. The configuration tells how many there are.
    """
    is_query = "linear_q_down_proj" in leaf.key
    rows = config.q_lora_rank if is_query else config.kv_lora_rank + config.qk_pos_emb_head_dim
    if shape[0] == rows:
        return start, shape
    if leaf.data.shape[0] == rows:
        return (0, *start[1:]), (rows, *shape[1:])
    raise ValueError(f"{shape[0]} rows, but the configuration says {rows}")
