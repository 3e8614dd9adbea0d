"""The self-test: flip bits of live weights, see that the engine's output changes, flip them back, see that it is as
before.

Finds what no digest can: weights that nobody reads because the engine computes with a packed copy of its own. Asked for
by configuration, at join. Must import nothing above audit.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from megasync.errors import MegasyncError, PlanError, TaintedError
from megasync.layout.evaluate import xor_
from megasync.receiver.audit import pieces
from megasync.receiver.bind import Binding
from megasync.receiver.dense import read_words
from megasync.receiver.shadow import same_bytes
from megasync.receiver.votes import together, vote

_NUMBER = re.compile(r"\d+")
_log = logging.getLogger(__name__)


def _bits(mantissa: int, exponents: Sequence[int] = (1, 2, 3, 0)) -> tuple[int, ...]:
    return (1 << (mantissa - 1), *(1 << (mantissa + k) for k in exponents))


_FLIPS: dict[str, tuple[int, ...]] = {
    "BF16": _bits(7),
    "F16": _bits(10),
    "F32": _bits(23),
    "F64": _bits(52),
    "F8_E4M3": _bits(3),
    "F8_E5M2": _bits(2),
    "F8_E4M3FNUZ": _bits(3),
    "F8_E5M2FNUZ": _bits(2),
    "F4": (0x88,),
}
"""Bits to flip, one after the other until the output changes: the top bit of the mantissa (the signs of packed fp4), which
changes a weight by up to a half, then bits of the exponent, which make it larger or smaller by 4, 16, 256, 2. Tensors of
other dtypes are not flipped."""

_INFINITE = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000, "F64": 0x7FF << 52, "F8_E5M2": 0x7C}

_Verdict = Literal["read", "unread", "unseen", "underived"]
_UNTOLD: dict[_Verdict, str] = {
    "underived": "they reach the engine through derivations, and no flip of them changes what is derived",
    "unseen": (
        "they reach the engine through derivations; what is derived changes with them and the output does not: observe() "
        "does not show it, or the engine computes with a copy"
    ),
}


@dataclass(frozen=True, slots=True)
class _Case:
    """Tensors that are flipped together: those of one name pattern, all of them read by derivations or none.

    Attributes:
        pattern: Canonical name with numbers replaced.
        ids: Tensor ids.
        derived: A derivation of some rank reads them.
        partners: All flippable inputs of this rank's derivations that read them, themselves too.
    """

    pattern: str
    ids: tuple[int, ...]
    derived: bool
    partners: tuple[int, ...]


def self_test(binding: Binding) -> tuple[str, ...]:
    """Flip, observe, flip back, for all tensors of one name pattern at a time. *Collective*.

    A tensor that reaches the engine through a derivation may leave its outputs as they are (the smaller of two scales whose
    largest counts): it is flipped in other bits and together with the derivation's other inputs. Where no flip changes the
    engine's output, a warning says that it could not be told, and whether what is derived did change.

    Args:
        binding: This rank; its weights were audited.

    Returns:
        The patterns whose flips changed the output; empty where the engine cannot be observed.

    Raises:
        PlanError: Output did not change: these weights are not what the engine computes with. Everything is as before.
        TaintedError: Flipping back failed, or output after it is not what it was.
    """
    engine = binding.engine
    first = together(engine, "self-test", engine.observe)
    with vote(engine, "self-test") as ballot:
        ballot.data = bytes([first is not None])
    if not any(map(any, ballot.result)):
        return ()
    found: dict[_Verdict, list[str]] = {"read": [], "unread": [], "unseen": [], "underived": []}
    for case in _cases(binding):
        found[_verdict(binding, case, first)].append(case.pattern)
    last = together(engine, "self-test", engine.observe)
    if _any(binding, last != first)[0]:
        raise TaintedError("self-test: output differs after all bits were flipped back; load the weights anew")
    if found["unread"]:
        raise PlanError(
            f"self-test: flipping bits of {', '.join(found['unread'][:20])} changes no output of {engine.name}: it computes "
            "with other memory (a packed copy, say). Everything is as before. Exclude them or change the engine's configuration"
        )
    for verdict, why in _UNTOLD.items():
        if found[verdict]:
            listed = ", ".join(found[verdict][:20])
            _log.warning("self-test of %s: could not be told for %s: %s", engine.name, listed, why)
    return tuple(found["read"])


def _cases(binding: Binding) -> Iterator[_Case]:
    """Every tensor that can be flipped, once; the same on every rank but for what derivations of the rank read."""
    schema = binding.schema
    read = {schema.ids[n] for d in binding.shadows.derivations for n in d.inputs}
    with vote(binding.engine, "self-test") as ballot:
        ballot.data = np.array(sorted(read), dtype="<i8").tobytes()
    read = {int(i) for d in ballot.result for i in np.frombuffer(d, "<i8")}
    found: dict[tuple[str, bool], list[int]] = {}
    for i, spec in enumerate(schema.tensors):
        if spec.dtype in _FLIPS and spec.num_words and i not in binding.excluded:
            found.setdefault((_NUMBER.sub("#", spec.name), i in read), []).append(i)
    for (pattern, derived), ids in found.items():
        inputs = {schema.ids[n] for d in binding.shadows.touched(ids) for n in d.inputs} | set(ids)
        partners = tuple(sorted(i for i in inputs if schema.tensors[i].dtype in _FLIPS))
        yield _Case(pattern, tuple(ids), derived, partners)


def _verdict(binding: Binding, case: _Case, first: bytes | None) -> _Verdict:
    derives = False
    for bit in range(max(map(len, _FLIPS.values()))):
        for ids in (case.ids, case.partners) if case.derived else (case.ids,):
            seen, derived = _attempt(binding, case, ids, bit, first)
            if seen:
                return "read"
            derives |= derived
    if not case.derived:
        return "unread"
    return "unseen" if derives else "underived"


def _attempt(binding: Binding, case: _Case, ids: Sequence[int], bit: int, first: bytes | None) -> tuple[bool, bool]:
    """Whether the output changed on some rank, and whether an output of a derivation that reads the tensors did."""
    engine, what = binding.engine, f"self-test of {case.pattern}"
    seen = derived = False
    try:
        try:
            derived = together(engine, what, lambda: _flip(binding, ids, bit, case.ids))
        except MegasyncError as e:  # a derivation may refuse the flipped values: parts whose scales differ, say
            _log.debug("%s: %s", what, e)
            derived = False
        else:
            seen = together(engine, what, engine.observe) != first
    finally:
        try:
            together(engine, what, lambda: _flip(binding, ids, bit, case.ids))
        except Exception as e:
            raise TaintedError(f"{what}: flipping the bits back failed ({e}); load the weights anew") from e
    return _any(binding, seen, derived)


def _any(binding: Binding, seen: bool, derived: bool = False) -> tuple[bool, bool]:
    """Both, over all ranks. *Collective*."""
    with vote(binding.engine, "self-test") as ballot:
        ballot.data = bytes([seen, derived])
    return any(b[0] for b in ballot.result), any(b[1] for b in ballot.result)


def _flip(binding: Binding, ids: Sequence[int], bit: int, of: Sequence[int]) -> bool:
    """XOR one bit of every word, copies included, and derive again what depends on it. A second call undoes the first.

    Returns:
        Whether an output of a derivation that reads one of ``of`` changed.
    """
    for i in ids:
        if i in binding.held:
            _flip_one(binding, i, bit)
    groups = binding.shadows.touched(ids)
    values = [binding.shadows.derive(d, binding.storages) for d in groups]
    tensors = binding.engine.tensors()
    mine = {d.name for d in binding.shadows.touched(of)}
    changed = False
    for d, new in zip(groups, values, strict=True):
        changed |= d.name in mine and any(not same_bytes(new[n], tensors[n]) for n in d.outputs)
        binding.shadows.write_(d, new, tensors)
    return changed


def _flip_one(binding: Binding, tensor_id: int, bit: int) -> None:
    dtype = binding.schema.tensors[tensor_id].dtype
    flips = _FLIPS[dtype]
    for piece in pieces(binding.held[tensor_id]):
        words = read_words(piece.reading, binding.storages)
        flip = words.dtype.type(flips[min(bit, len(flips) - 1)])
        # Neither a NaN or infinity nor what would become one is flipped: a rule that a second flip does not change.
        keep = _is_special(words, dtype) | _is_special(words ^ flip, dtype)
        mask = np.where(keep, words.dtype.type(0), flip).reshape(-1).view(np.uint8)
        device = binding.storages[piece.layout.records[0].storage].device
        xor_(piece.layout, binding.storages, torch.from_numpy(mask).to(device))


def _is_special(words: np.ndarray, dtype: str) -> np.ndarray:
    """Whether words are NaN or infinity, bool of the same shape."""
    if dtype in _INFINITE:
        found: np.ndarray = (words & words.dtype.type(_INFINITE[dtype])) == _INFINITE[dtype]
        return found
    if dtype == "F8_E4M3":
        return np.asarray((words & np.uint8(0x7F)) == 0x7F)
    return np.asarray(words == 0x80) if dtype.endswith("FNUZ") else np.zeros(words.shape, dtype=bool)
