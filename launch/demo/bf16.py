"""BF16 weights with FP32 arithmetic: what a CPU computes fast, with the wire of a BF16 model.

The live Megatron parameters are FP32 tensors that hold BF16 values, and the optimizer steps full-precision copies. So
the trainer computes with exactly the weights that it publishes. On a GPU none of this is needed: train with BF16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from megasync.errors import PlanError
from megasync.trainer.exporter import Exporter, Piece
from megasync.types import TensorSpec


class MasterWeights:
    """Stands in for an optimizer: steps FP32 master weights and leaves their BF16 rounding in the live parameters.

    Args:
        optimizer: Megatron's, over FP32 parameters.
        parameters: The parameters; rounded at once.
    """

    def __init__(self, optimizer: Any, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._live = [p.detach() for p in parameters]
        self._masters = [p.clone() for p in self._live]
        self._round_()

    def step(self) -> Any:
        """One step of the optimizer, on the masters."""
        torch._foreach_copy_(self._live, self._masters)
        result = self._optimizer.step()
        torch._foreach_copy_(self._masters, self._live)
        self._round_()
        return result

    def zero_grad(self) -> None:
        """See the optimizer."""
        self._optimizer.zero_grad()

    def set_lr(self, lr: float) -> None:
        """Use another learning rate from the next step on."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def _round_(self) -> None:
        for live in self._live:
            live.copy_(live.bfloat16())


class Bf16Exporter(Exporter):
    """Exports FP32 parameters that hold BF16 values as BF16, in place.

    A BF16 number is the upper half of the same number in FP32, so a view of every second 16-bit word is the tensor.

    Args:
        inner: Exporter of the FP32 parameters.
    """

    def __init__(self, inner: Exporter) -> None:
        self._inner = inner

    def specs(self) -> list[TensorSpec]:
        """See ``Exporter.specs``."""
        specs = self._inner.specs()
        if wrong := [s.name for s in specs if s.dtype != "F32"]:
            raise PlanError(f"these tensors are not FP32 and have no upper half to publish: {', '.join(wrong)}")
        return [replace(s, dtype="BF16") for s in specs]

    def pieces(self) -> list[Piece]:
        """See ``Exporter.pieces``."""
        return [replace(p, data=p.data.view(torch.bfloat16)[..., 1::2]) for p in self._inner.pieces()]

    def settle(self) -> float:
        """See ``Exporter.settle``."""
        return self._inner.settle()

    def check_alive(self) -> None:
        """See ``Exporter.check_alive``."""
        self._inner.check_alive()
