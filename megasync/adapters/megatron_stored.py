"""Plain memory in place of Megatron parameters that TransformerEngine keeps quantised, while an export is planned.

Such parameters (``fp8_param``, ``fp4_param``: primary weights in FP8 or NVFP4) are tensor subclasses without memory of their
own, and cutting one makes a dequantised copy. So planning cuts a stand-in of the same shape: where a view of it lies says
which region of the parameter is meant. Stand-ins are never written, so they take address space and no memory. Used by
megatron_leaves.py and megatron_plan.py; must not import receiver or TransformerEngine.
"""

from __future__ import annotations

from typing import Any

import torch

from megasync.adapters.transformer_engine import StoredWeight, codes_of, storage_of
from megasync.types import Box, CutAxis


class StandIns:
    """Stand-ins of one chunk's quantised parameters.

    Args:
        model: The unwrapped chunk.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._by_id: dict[int, tuple[torch.Tensor, Any]] = {}
        self._by_address: dict[int, tuple[torch.Tensor, Any]] = {}
        for _, param in model.named_parameters():
            if storage_of(param) is None or id(param) in self._by_id:
                continue
            made = torch.empty(tuple(param.shape), dtype=torch.uint8), param
            self._by_id[id(param)] = made
            codes = codes_of(param)
            if codes is not None:
                self._by_address[codes.data_ptr()] = made

    def plain(self, tensor: Any) -> Any:
        """The stand-in of a quantised parameter, or of a detached alias of one; any other object as it is."""
        made = self._find(tensor)
        return tensor if made is None else made[0]

    def parameter(self, tensor: Any) -> Any | None:
        """The quantised parameter itself; None for anything else."""
        made = self._find(tensor)
        return None if made is None else made[1]

    def _find(self, tensor: Any) -> tuple[torch.Tensor, Any] | None:
        if storage_of(tensor) is None:
            return None
        codes = codes_of(tensor)
        return self._by_id.get(id(tensor)) or self._by_address.get(0 if codes is None else codes.data_ptr())


def stored_weight(
    name: str,
    param: Any,
    whole: torch.Tensor,
    view: torch.Tensor,
    shape: tuple[int, ...],
    box: Box,
    *,
    layer: int,
    cut: CutAxis,
    chunk: int,
) -> StoredWeight:
    """The record of a region of a quantised parameter.

    Args:
        name: Canonical name.
        param: The parameter.
        whole: Its stand-in.
        view: The region, as a view of the stand-in.
        shape: Shape of the whole canonical weight.
        box: Where the region lies in it.
        layer: Global layer.
        cut: Cut axis of the tile grid.
        chunk: Model chunk.

    Raises:
        ValueError: Not a region of a matrix that lies as the parameter does; says what was found.
    """
    if len(shape) != 2 or whole.dim() != 2 or view.dim() != 2:
        raise ValueError(f"a quantised tensor of shape {list(shape)}; quantised weights are matrices")
    if view.stride() != whole.stride():
        raise ValueError("a quantised weight that lies transposed; its row-wise codes have the other order")
    row, column = divmod(int(view.storage_offset() - whole.storage_offset()), max(whole.stride(0), 1))
    return StoredWeight(name, param, (shape[0], shape[1]), box, (row, column), layer, cut, chunk)
