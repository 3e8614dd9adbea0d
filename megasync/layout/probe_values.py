"""The values that a probe must not miss, and the range that it may be held to.

Random bits almost never hold a zero, an infinity or a subnormal, and a loader that treats just these otherwise (a zero
scale becomes 1, -0 becomes 0) would pass for a mover. Before it comes `probe`; after it `probe_draws`. This module must
import nothing of megasync but ``layout``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from megasync.layout.live import Specs
from megasync.layout.probe_patterns import ALPHABETS, FLOATS, Alphabet, as_tensor, dtype_name

Ranges = Mapping[str, tuple[float, float]]
"""Canonical name to the lowest and highest value that its loader takes."""

_MIN_SYMBOLS = 4


@dataclass(frozen=True, slots=True)
class SpecialWords:
    """Patterns of a dtype that loaders treat otherwise than the rest.

    Attributes:
        finite: Zeros of both signs, subnormals and normals at their limits, ones, powers of two; of integers the limits,
            and words of all-equal nibbles and bytes at theirs.
        other: Infinities and NaN: quiet, signalling, of all bits.
    """

    finite: tuple[int, ...]
    other: tuple[int, ...]


def special_words(dtype: torch.dtype) -> SpecialWords:
    """The special patterns of a dtype.

    Raises:
        ValueError: The dtype cannot be probed.
    """
    name, bits = dtype_name(dtype), 8 * dtype.itemsize
    if name == "bool":
        return SpecialWords((0, 1), ())
    if name == "complex64":
        # Each part alone beside an ordinary one.
        part, plain = special_words(torch.float32), 0x3F800000
        finite, other = (
            tuple(w | plain << 32 for w in words) + tuple(w << 32 | plain for w in words)
            for words in (part.finite, part.other)
        )
        return SpecialWords(finite, other)
    form = FLOATS.get(name)
    sign = 1 << (bits - 1)
    if form is None:
        fill = (2 * sign - 1) // 255
        words = (0, 1, sign - 1, sign, 2 * sign - 1, *(b * fill for b in (0x08, 0x0F, 0x80, 0x88, 0xF0, 0x7F)))
        return SpecialWords(tuple(dict.fromkeys(words)), ())
    if form.style == "scale":
        return SpecialWords((0, 1, 0x40, 0x7E, 0x7F, 0x80, 0xFE), (0xFF,))
    low = 1 << form.mantissa
    exponents = (sign - 1) // low * low
    top = {"ieee": exponents - 1, "fn": sign - 2, "fnuz": sign - 1}[form.style]
    one, half = form.bias * low, form.bias // 2 * low
    positive = (0, 1, low - 1, low, top, one)
    regular = (*positive, *(sign | w for w in positive if w or form.style != "fnuz"), one + 1, one - half, one + half)
    rest = {
        "ieee": (exponents, sign | exponents, exponents | 1, exponents | low >> 1, 2 * sign - 1),
        "fn": (sign - 1, 2 * sign - 1),
        "fnuz": (sign,),
    }[form.style]
    return SpecialWords(regular, rest)


def checked_ranges(specs: Specs, values: Ranges | tuple[float, float] | None) -> dict[str, tuple[float, float]]:
    """The ranges of a probe, checked.

    Args:
        specs: Canonical name to extents and torch dtype.
        values: By name, or one for every float tensor.

    Returns:
        Canonical name to range.

    Raises:
        ValueError: An unknown name, a tensor that is no real float, or a range that is empty or holds hardly a value.
    """
    if values is None:
        return {}
    if isinstance(values, Mapping):
        ranges = {n: (float(a), float(b)) for n, (a, b) in values.items()}
    else:
        low, high = values
        ranges = {n: (float(low), float(high)) for n, (_, d) in specs.items() if dtype_name(d) in FLOATS}
    for name, (low, high) in ranges.items():
        if name not in specs:
            raise ValueError(f"a range is given for {name}, which is not among the canonical tensors")
        if dtype_name(specs[name][1]) not in FLOATS:
            raise ValueError(f"a range is given for {name}, which is {specs[name][1]}: ranges are of real floats")
        if not -np.inf < low < high < np.inf:
            raise ValueError(f"the range of {name} is {low} to {high}: it must be finite, and not empty")
    return ranges


def alphabets_of(specs: Specs, ranges: Ranges, *, near: bool = True) -> dict[str, Alphabet]:
    """The patterns that spell positions in each tensor: inside its range, near 1 where that is.

    Args:
        specs: Canonical name to extents and torch dtype.
        ranges: Checked ranges.
        near: Keep near 1; else take the whole of one sign of the range, where there is one.

    Returns:
        Canonical name to patterns.

    Raises:
        ValueError: A range holds too few values.
    """
    return {n: _alphabet(n, d, ranges.get(n), near) for n, (_, d) in specs.items()}


def special_in(dtype: torch.dtype, span: tuple[float, float], whole: Alphabet) -> SpecialWords:
    """The special patterns inside a range, its ends among them.

    Args:
        dtype: A real float dtype.
        span: Lowest and highest value.
        whole: All patterns of one sign inside.
    """
    words = np.array((*special_words(dtype).finite, whole.first, whole.first + whole.size - 1))
    values = as_tensor(words.astype(f"<u{dtype.itemsize}"), words.shape, dtype).to(torch.float64).numpy()
    kept = words[(values >= span[0]) & (values <= span[1])]
    return SpecialWords(tuple(dict.fromkeys(int(w) for w in kept)), ())


def held_(tensor: torch.Tensor, span: tuple[float, float], alphabet: Alphabet) -> torch.Tensor:
    """Replaces values outside a range by others inside it, in place.

    Args:
        tensor: CPU, contiguous, of a real float dtype.
        span: Lowest and highest value.
        alphabet: Patterns of values inside.

    Returns:
        The tensor.
    """
    if not tensor.numel():
        return tensor
    words = tensor.reshape(-1).view(torch.uint8).numpy().view(f"<u{tensor.dtype.itemsize}")
    values = tensor.reshape(-1).to(torch.float64).numpy()
    # A NaN compares false, so it is outside.
    outside = ~((values >= span[0]) & (values <= span[1]))
    mixed: np.ndarray = words[outside].astype(np.uint64) + np.arange(int(outside.sum()), dtype=np.uint64)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    symbols = (mixed >> np.uint64(1)) % np.uint64(alphabet.size)
    words[outside] = (symbols + np.uint64(alphabet.first)).astype(words.dtype)
    return tensor


def _alphabet(name: str, dtype: torch.dtype, span: tuple[float, float] | None, near: bool) -> Alphabet:
    usual = ALPHABETS[dtype_name(dtype)]
    if span is None:
        return usual
    sign = 0 if dtype_name(dtype) == "float8_e8m0fnu" or span[1] > 0 else 1 << (8 * dtype.itemsize - 1)
    low, high = (span[0], span[1]) if not sign else (-span[1], -span[0])
    first, last = _first_at_least(max(low, 0.0), dtype), _first_at_least(np.nextafter(high, np.inf), dtype) - 1
    common = max(first, usual.first), min(last, usual.first + usual.size - 1)
    if near and not sign and common[1] - common[0] >= min(64, usual.size) - 1:
        first, last = common
    if last - first + 1 < _MIN_SYMBOLS:
        raise ValueError(f"the range of {name}, {span[0]} to {span[1]}, holds fewer than {_MIN_SYMBOLS} of {dtype}")
    # Positions are spelt by digits of at most this size, as in the usual patterns.
    return Alphabet(sign | first, min(last - first + 1, 1 << 40) if near else last - first + 1)


def _first_at_least(value: float, dtype: torch.dtype) -> int:
    """The smallest pattern without a sign whose value is not below a value; patterns are ordered as their values."""
    low, high = 0, (1 << (8 * dtype.itemsize - 1)) - 1
    if dtype_name(dtype) == "float8_e8m0fnu":
        high = 0xFF
    while low < high:
        middle = (low + high) // 2
        word = as_tensor(np.array([middle], dtype=f"<u{dtype.itemsize}"), (1,), dtype)
        found = float(word.to(torch.float64))
        if found >= value or found != found:
            high = middle
        else:
            low = middle + 1
    return low
