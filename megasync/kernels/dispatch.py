"""Which of the two forms of a kernel runs: Triton on a GPU that has it, the plain-torch reference elsewhere.

Both give the same bytes and sums. Must import nothing of megasync.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache

import torch


@lru_cache(maxsize=1)
def triton_found() -> bool:
    """Whether the package triton is installed; nothing is imported."""
    return importlib.util.find_spec("triton") is not None


def uses_triton(device: torch.device) -> bool:
    """Whether tensors on ``device`` go to the Triton kernels."""
    return device.type == "cuda" and triton_found()
