"""Quantisation formulas by name and version: part of the wire contract, as another order of operations is other bytes.

The schema records a formula id with each quantised tensor: ``family/name@version``, for example ``nvfp4/te-2d@1``.
Weights are quantised from their bfloat16 values unless the id ends in ``+f32`` (fp32 master values). A published id
never changes what it computes; a different rule is a new version. Must import nothing above kernels.

* ``nvfp4/te-2d``, ``nvfp4/te-1d``: TransformerEngine's order, 16 x 16 or 1 x 16 blocks.
* ``nvfp4/modelopt-1d``: nvidia-modelopt's order, 1 x 16 blocks.
* ``nvfp4/compressed-tensors-1d``: compressed-tensors' order with the min-max observer, 1 x 16 blocks.
* ``fp8/deepgemm-128``, ``fp8/deepgemm-128-ue8m0``: DeepGEMM's order, 128 x 128 blocks, any or power-of-two scales.
* ``fp8/te-128``, ``fp8/te-128-pow2``, ``fp8/te-tensor``: TransformerEngine's order, per block or per tensor.
* ``fp8/channel``, ``fp8/tensor``: compressed-tensors' order in fp32, per output row or per tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from megasync.kernels.fp8_reference import Fp8Order
from megasync.kernels.nvfp4_reference import Order

Source = Literal["BF16", "F32"]
TORCH_SOURCES: dict[str, torch.dtype] = {"BF16": torch.bfloat16, "F32": torch.float32}


@dataclass(frozen=True, slots=True)
class Formula:
    """One way to make bytes from a weight.

    Attributes:
        family: ``nvfp4`` or ``fp8``.
        name: Name inside the family.
        version: Starts at 1; a published version never changes.
        source: Values that are quantised: the weight's bfloat16, or its fp32 master.
        block: Rows and columns that share a scale; 0 means all of that axis.
        order: Order of operations.
        pow2: Scales are powers of two (ue8m0).
    """

    family: Literal["nvfp4", "fp8"]
    name: str
    version: int
    block: tuple[int, int]
    order: Order | Fp8Order
    source: Source = "BF16"
    pow2: bool = False

    @property
    def id(self) -> str:
        """What the schema records."""
        return f"{self.family}/{self.name}@{self.version}{'' if self.source == 'BF16' else '+f32'}"

    @property
    def needs_amax(self) -> bool:
        """True where one amax of the whole tensor enters every byte, so that it must be reduced over all owners."""
        return self.family == "nvfp4" or self.block == (0, 0)

    @property
    def torch_source(self) -> torch.dtype:
        """Torch dtype of the values that are quantised."""
        return TORCH_SOURCES[self.source]


_KNOWN = {
    (f.family, f.name, f.version): f
    for f in (
        Formula("nvfp4", "te-2d", 1, (16, 16), Order.TE),
        Formula("nvfp4", "te-1d", 1, (1, 16), Order.TE),
        Formula("nvfp4", "modelopt-1d", 1, (1, 16), Order.MODELOPT),
        Formula("nvfp4", "compressed-tensors-1d", 1, (1, 16), Order.COMPRESSED),
        Formula("fp8", "deepgemm-128", 1, (128, 128), Fp8Order.DEEPGEMM),
        Formula("fp8", "deepgemm-128-ue8m0", 1, (128, 128), Fp8Order.DEEPGEMM, pow2=True),
        Formula("fp8", "te-128", 1, (128, 128), Fp8Order.TE),
        Formula("fp8", "te-128-pow2", 1, (128, 128), Fp8Order.TE, pow2=True),
        Formula("fp8", "te-tensor", 1, (0, 0), Fp8Order.TE),
        Formula("fp8", "channel", 1, (1, 0), Fp8Order.DIVIDE),
        Formula("fp8", "tensor", 1, (0, 0), Fp8Order.DIVIDE),
    )
}


def formula(id: str) -> Formula:
    """The formula of an id.

    Args:
        id: ``family/name@version``, with ``+f32`` where fp32 master values are quantised. ``@version`` may be left out
            in configuration and then means the newest.

    Raises:
        ValueError: Listing the known ids.
    """
    base, _, suffix = id.partition("+")
    path, _, version = base.partition("@")
    family, _, name = path.partition("/")
    versions = sorted(v for f, n, v in _KNOWN if (f, n) == (family, name))
    wanted = int(version) if version.isdecimal() else (versions[-1] if versions and not version else 0)
    if wanted not in versions or suffix not in ("", "f32"):
        known = ", ".join(known_ids())
        raise ValueError(f"unknown quantisation formula {id!r}; known (+f32 for fp32 masters): {known}")
    found = _KNOWN[family, name, wanted]  # type: ignore[index]
    return replace(found, source="F32") if suffix else found


def known_ids() -> list[str]:
    """Ids of every formula, for bfloat16 sources, sorted."""
    return sorted(f.id for f in _KNOWN.values())
