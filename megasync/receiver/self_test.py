"""The self-test: flip bits of live weights, see that the engine's output changes, flip them back, see that it is as
before.

Finds what no digest can: weights that nobody reads because the engine computes with a packed copy of its own. Asked for
by configuration, at join. Must import nothing above bind.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import torch

from megasync.errors import PlanError, TaintedError
from megasync.layout.evaluate import xor_
from megasync.receiver.bind import Binding
from megasync.receiver.votes import together

_NUMBER = re.compile(r"\d+")

_FLIPS: dict[str, int] = {
    "BF16": 0x0040,
    "F16": 0x0200,
    "F32": 0x00400000,
    "F64": 1 << 51,
    "F8_E4M3": 0x04,
    "F8_E5M2": 0x02,
    "F8_E4M3FNUZ": 0x04,
    "F8_E5M2FNUZ": 0x02,
    "F4": 0x88,
}
"""The top bit of the mantissa (the signs of packed fp4): changes a weight by up to a half, makes no infinity or NaN of
one that is neither. Tensors of other dtypes are not flipped."""


def self_test(binding: Binding) -> tuple[str, ...]:
    """Flip, observe, flip back, for all tensors of one name pattern at a time. *Collective*.

    Args:
        binding: This rank; its weights were audited.

    Returns:
        The patterns that were tested; empty where the engine cannot be observed.

    Raises:
        PlanError: Output did not change: these weights are not what the engine computes with. Everything is as before.
        TaintedError: Output after flipping back is not what it was.
    """
    engine = binding.engine
    first = together(engine, "self-test", engine.observe)
    if first is None:
        return ()
    tested: list[str] = []
    unread: list[str] = []
    for pattern, ids in _patterns(binding):
        together(engine, f"self-test of {pattern}", lambda ids=ids: _flip(binding, ids))  # type: ignore[misc]
        try:
            changed = together(engine, f"self-test of {pattern}", engine.observe)
        finally:
            together(engine, f"self-test of {pattern}", lambda ids=ids: _flip(binding, ids))  # type: ignore[misc]
        tested.append(pattern)
        if changed == first:
            unread.append(pattern)
    last = together(engine, "self-test", engine.observe)
    if last != first:
        raise TaintedError("self-test: output differs after all bits were flipped back; load the weights anew")
    if unread:
        raise PlanError(
            f"self-test: flipping bits of {', '.join(unread[:20])} changes no output of {engine.name}: it computes with other "
            "memory (a packed copy, say). Everything is as before. Exclude them or change the engine's configuration"
        )
    return tuple(tested)


def _patterns(binding: Binding) -> Iterator[tuple[str, list[int]]]:
    found: dict[str, list[int]] = {}
    for i, spec in enumerate(binding.schema.tensors):
        if spec.dtype in _FLIPS and spec.num_words and i not in binding.excluded:
            found.setdefault(_NUMBER.sub("#", spec.name), []).append(i)
    yield from found.items()


def _flip(binding: Binding, ids: list[int]) -> None:
    """XOR one bit of every word, copies included; derive again what depends on them."""
    for i in ids:
        if i not in binding.held:
            continue
        layout = binding.held[i].layout
        spec = binding.schema.tensors[i]
        word = _FLIPS[spec.dtype].to_bytes(spec.word_nbytes, "little")
        num = layout.slice_nbytes // spec.word_nbytes
        mask = torch.from_numpy(np.tile(np.frombuffer(word, np.uint8), num))
        xor_(layout, binding.storages, mask.to(binding.storages[layout.records[0].storage].device))
    for group in binding.shadows.touched(ids):
        values = binding.shadows.derive(group, binding.storages)
        binding.shadows.write_(group, values, binding.engine.tensors())
