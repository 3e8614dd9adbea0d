"""The leaves of a Megatron model chunk: global key, place in the global tensor, live memory.

Reads ``sharded_state_dict()``, which knows every parallel layout, and checks what megasync relies on: each leaf is
plain torch memory that belongs to a live parameter or buffer, and every parameter is covered by leaves. What it does
not support it refuses by name. megatron_plan.py maps the leaves to canonical tensors; no weights move here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from megasync.adapters.megatron_stored import StandIns
from megasync.errors import MissingPackageError


@dataclass(frozen=True, slots=True)
class Leaf:
    """A local tensor and where it lies in a global one.

    Attributes:
        name: Name in the chunk's own state dict, for messages.
        key: Megatron's global key.
        data: Live memory: the parameter's shape or a part of it, any strides.
        axes: Offsets on leading axes that the local tensor does not have (layer, expert).
        start: Offsets on the axes that it has.
        shape: Global extents of these axes.
    """

    name: str
    key: str
    data: torch.Tensor
    axes: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Owner:
    """The live tensor of a chunk in whose memory a leaf lies.

    Attributes:
        name: Name in the chunk.
        tensor: The parameter or buffer itself.
        is_parameter: False for a buffer, which something other than the optimizer writes.
        stored: The parameter itself where it is kept quantised; ``tensor`` is its stand-in then.
    """

    name: str
    tensor: torch.Tensor
    is_parameter: bool
    stored: Any = None


class ChunkMemory:
    """The parameters and buffers of one chunk, to be found by address.

    Args:
        model: The unwrapped chunk.
        stand_ins: Of its quantised parameters.
    """

    def __init__(self, model: torch.nn.Module, stand_ins: StandIns) -> None:
        owners = [Owner(n, stand_ins.plain(p), True, stand_ins.parameter(p)) for n, p in model.named_parameters()]
        owners += [Owner(n, b, False) for n, b in model.named_buffers()]
        self.refused = [f"{o.name}: {reason}" for o in owners if (reason := _not_plain(o.tensor))]
        self._owners = sorted((o for o in owners if not _not_plain(o.tensor) and o.tensor.numel()), key=_start_of)
        self._starts = [_start_of(o) for o in self._owners]
        self._claimed: dict[str, set[tuple[int, tuple[int, ...], tuple[int, ...]]]] = {}
        self._claimed_nbytes: dict[str, int] = {}

    def claim(self, data: torch.Tensor) -> Owner | None:
        """The parameter or buffer in whose memory a leaf lies, whose bytes then count as covered.

        Args:
            data: A leaf's data, not empty.

        Returns:
            The owner; None where the data is a copy, or memory of something else.
        """
        first, last = _address_range(data)
        at = bisect_right(self._starts, first) - 1
        if at < 0 or last > _address_range(self._owners[at].tensor)[1]:
            return None
        owner = self._owners[at]
        view = (data.data_ptr(), tuple(data.shape), data.stride())
        seen = self._claimed.setdefault(owner.name, set())
        if view not in seen:
            seen.add(view)
            nbytes = data.numel() * data.element_size()
            self._claimed_nbytes[owner.name] = self._claimed_nbytes.get(owner.name, 0) + nbytes
        return owner

    def uncovered(self) -> list[str]:
        """Parameters of which some bytes lie in no leaf that was claimed, with the numbers."""
        missing: list[str] = []
        for owner in self._owners:
            nbytes = owner.tensor.numel() * owner.tensor.element_size()
            covered = self._claimed_nbytes.get(owner.name, 0)
            if owner.is_parameter and covered != nbytes:
                missing.append(f"{owner.name} ({covered} of {nbytes} bytes)")
        return missing


def read_leaves(model: Any, metadata: Mapping[str, Any], stand_ins: StandIns) -> tuple[list[Leaf], list[str]]:
    """Read a chunk's leaves.

    Args:
        model: The unwrapped chunk.
        stand_ins: Of its quantised parameters, whose leaves are views of these.
        metadata: Passed to ``sharded_state_dict``; it decides how keys are spelt.

    Returns:
        The leaves, and what is in the state dict but cannot be exported, by name with the reason.

    Raises:
        MissingPackageError: megatron-core is not installed.
    """
    try:
        from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
    except ImportError as e:
        raise MissingPackageError("megatron-core is not installed: pip install 'megasync[megatron]'") from e
    leaves: list[Leaf] = []
    refused: list[str] = []
    # A fresh dict for each chunk: Megatron writes its process groups into it.
    for name, entry in _flatten("", model.sharded_state_dict(prefix="", metadata=dict(metadata))):
        if isinstance(entry, ShardedObject):
            continue  # `_extra_state`: no weights
        if isinstance(entry, ShardedTensorFactory):
            # The factory cuts what it is given: a quantised parameter would become dequantised copies.
            built = _flatten(name, replace(entry, data=stand_ins.plain(entry.data)).build())
        else:
            built = [(name, entry)]
        for inner, shard in built:
            if not isinstance(shard, ShardedTensor):
                refused.append(f"{inner}: {type(shard).__name__} among the leaves")
            elif getattr(shard, "is_torch_fsdp2_param", False) or getattr(shard, "is_data_parallel_fully_shard", False):
                refused.append(f"{inner}: sharded over data parallel ranks by FSDP")
            elif shard.data is None or shard.flattened_range is not None:
                refused.append(f"{inner}: a leaf without its local tensor")
            elif reason := _not_plain(data := stand_ins.plain(shard.data)):
                refused.append(f"{inner}: {reason}")
            else:
                num = shard.prepend_axis_num
                leaves.append(
                    Leaf(
                        inner,
                        shard.key,
                        data.detach(),
                        tuple(shard.global_offset[:num]),
                        tuple(shard.global_offset[num:]),
                        tuple(shard.global_shape[num:]),
                    )
                )
    return leaves, refused


def unsupported(chunk: Any, model: Any, keeps_rows: bool) -> list[str]:
    """Settings of a chunk under which live parameters are not what the leaves or the tables say.

    Args:
        chunk: The chunk as trained, wrapped.
        model: The unwrapped chunk.
        keeps_rows: Whether the table keeps Megatron's own rows, so that no layout of fused rows matters.

    Returns:
        One sentence a setting; empty when all is well.
    """
    config, ddp_config = getattr(model, "config", None), getattr(ddp_of(chunk), "ddp_config", None)
    found: list[str] = []
    layer = chunk
    while layer is not None:
        if "FullyShardedDataParallel" in type(layer).__name__ or "FSDP" in type(layer).__name__:
            found.append(
                f"{type(layer).__name__} shards parameters over data parallel ranks; use DistributedDataParallel"
            )
        layer = getattr(layer, "module", None)
    for name in ("gtp_weight_remat_size", "expert_gtp_weight_remat_size"):
        if getattr(config, name, 1) > 1:
            found.append(
                f"{name}={getattr(config, name)}: GTP shards rows once more, which is not supported; set it to 1"
            )
    if getattr(ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False):
        found.append(
            "reuse_grad_buf_for_mxfp8_param_ag keeps gathered parameters in the gradient buffer; switch it off"
        )
    if getattr(ddp_config, "use_megatron_fsdp", False):
        found.append("use_megatron_fsdp shards parameters over data parallel ranks; switch it off")
    if keeps_rows:
        return found
    if getattr(config, "attention_output_gate", False):
        found.append("attention_output_gate puts gate rows into the fused QKV projection, which no table describes")
    for name in ("moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size"):
        if getattr(config, name, None):
            found.append(f"{name}={getattr(config, name)} interleaves gate and up rows, which no table describes")
    return found


def unwrap(chunk: Any) -> Any:
    """The model inside Megatron's wrappers (DistributedDataParallel, Float16Module)."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def ddp_of(chunk: Any) -> Any:
    """The wrapper of a chunk that gathers its parameters (it has a ``ddp_config``); None when there is none."""
    while chunk is not None and not hasattr(chunk, "ddp_config"):
        chunk = getattr(chunk, "module", None)
    return chunk


def _flatten(prefix: str, entry: Any) -> Iterable[tuple[str, Any]]:
    """All leaves of nested dicts and lists, with names to find them by."""
    if isinstance(entry, Mapping):
        for name, inner in entry.items():
            yield from _flatten(f"{prefix}.{name}" if prefix else str(name), inner)
    elif isinstance(entry, list | tuple):
        for inner in entry:
            yield from _flatten(prefix, inner)
    else:
        yield prefix, entry


def _not_plain(tensor: Any) -> str:
    """Why a tensor is not plain memory, or nothing. Subclasses hide their bytes (DTensor, quantised ones, GTP)."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return f"of type {type(tensor).__name__}, not a plain tensor; export of such parameters is not supported"
    if tensor.layout != torch.strided or tensor.is_meta:
        return f"{tensor.layout} on {tensor.device}: not plain memory"
    return ""


def _start_of(owner: Owner) -> int:
    return _address_range(owner.tensor)[0]


def _address_range(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and the byte after the last one that a tensor touches."""
    first: int = tensor.data_ptr()
    span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return first, first + span * tensor.element_size()
