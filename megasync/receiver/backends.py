"""Which backend places and writes: chosen by name, or by one rule, and reported in every result.

``auto`` takes ``cpu`` where all live weights are in host memory, ``gpu`` where they are on a GPU: that is ``scatter``, or
``de`` or ``sm`` for publications of block codecs, by the rule of ``stream_auto``. ``mask`` is the plain reference for any
device. Others are given as a callable. Must import nothing above backend; backends are imported when they are chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from megasync.receiver.backend import Backend
from megasync.receiver.bind import Binding
from megasync.receiver.scatter_audit import gpu_of

BackendChoice = str | Callable[[Binding], Backend]

_KNOWN: dict[str, tuple[str, str]] = {
    "cpu": ("megasync.receiver.cpu", "CpuBackend"),
    "mask": ("megasync.receiver.dense", "MaskBackend"),
    "scatter": ("megasync.receiver.scatter", "ScatterBackend"),
    "de": ("megasync.receiver.stream", "de_backend"),
    "sm": ("megasync.receiver.stream", "sm_backend"),
    "gpu": ("megasync.receiver.stream_auto", "AutoBackend"),
}
_PACED = ("scatter", "gpu")  # those that can stage quietly
_BY_DEVICE: dict[str, str] = {"cpu": "cpu", "cuda": "gpu"}


def backend_names(device: str | None = None) -> tuple[str, ...]:
    """Names that may be chosen, ``auto`` first.

    Args:
        device: Type of the live weights' device, to leave out what cannot write them; None for all.
    """
    known = [n for n in _KNOWN if device is None or n == "mask" or (n == "cpu") == (device == "cpu")]
    return ("auto", *known)


def make_backend(binding: Binding, choice: BackendChoice, *, quiet: bool = False) -> Backend:
    """The backend of a bound engine rank.

    Args:
        binding: The rank.
        choice: ``auto``, a known name, or a callable that makes one.
        quiet: Stage beside an engine that decodes (``config.Staging``); a callable sees to it by itself.

    Raises:
        ValueError: Unknown name, weights on several kinds of device, or a device that no known backend writes.
    """
    if callable(choice):
        return choice(binding)
    if choice == "auto":
        kinds = {d.type for d in binding.devices} or {"cpu"}
        if not kinds <= _BY_DEVICE.keys() or ("cuda" in kinds and gpu_of(binding) is None):
            raise ValueError(
                f"no backend writes weights on {sorted(map(str, binding.devices))} by itself: it takes host memory, or one GPU "
                f"with whole tensors beside it in host memory. Name one of {', '.join(_KNOWN)} (mask works on any device, "
                "slowly), or give a callable"
            )
        choice = _BY_DEVICE["cuda" if "cuda" in kinds else "cpu"]
    if choice not in _KNOWN:
        raise ValueError(f"backend {choice!r} is unknown; known: auto, {', '.join(_KNOWN)}")
    module, name = _KNOWN[choice]
    options = {"quiet": quiet} if choice in _PACED else {}
    made: Backend = getattr(import_module(module), name)(binding, **options)
    return made
