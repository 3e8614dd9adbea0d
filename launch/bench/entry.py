"""What the command lines of all benchmarks share: Hydra's options, settings that cannot work, a machine without CUDA.

Used by the ``main`` and ``__main__`` parts of launch/bench and launch/gpu_*.py. What is refused ends in one line and exit
status 2, before anything is made or measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from hydra.core.config_store import ConfigStore

from launch.choices import schema_of, typed

T = TypeVar("T")

_PLAIN = (
    "hydra.run.dir=.",
    "hydra.output_subdir=null",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
)


def plain_hydra(*, cuda: bool = True) -> None:
    """Put options before those of the command line that keep Hydra from making output folders and log files.

    Args:
        cuda: Whether what follows needs a CUDA device; where there is none, this ends the program (but for ``--help`` and
            Hydra's other options).
    """
    if cuda and not any(a.startswith("-") for a in sys.argv[1:]):
        require_cuda()
    sys.argv[1:1] = _PLAIN


def require_cuda(num_devices: int = 1) -> None:
    """End with one line and status 2 where torch finds fewer CUDA devices.

    Args:
        num_devices: Devices that are needed.
    """
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found >= num_devices:
        return
    needed = "a CUDA device" if num_devices == 1 else f"{num_devices} CUDA devices"
    built = "built without CUDA" if torch.version.cuda is None else f"built for CUDA {torch.version.cuda}"
    refuse(
        f"needs {needed}, torch {torch.__version__} ({built}) finds {found or 'none'}: run it where there is, "
        "with a torch built for CUDA (launch/bench.sh takes its interpreter as PYTHON=)"
    )


def refuse(why: str) -> NoReturn:
    """End the program: one line that begins with its name, exit status 2."""
    print(f"{Path(sys.argv[0]).stem}: {why}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def register(name: str, kind: type) -> None:
    """Make a settings class known to Hydra under a name; Enum fields take values and names."""
    ConfigStore.instance().store(name=name, node=schema_of(kind))


def settings_of(
    kind: type[T],
    config: Any,
    least: Mapping[str, float] | None = None,
    choices: Mapping[str, Collection[str]] | None = None,
) -> T:
    """The settings that Hydra composed; what cannot be measured ends the program.

    Args:
        kind: The class that was registered.
        config: What ``hydra.main`` hands over.
        least: Smallest values by field, where that is not 1 (whole numbers) or just above 0 (others).
        choices: Known texts by field, for fields that are not free text.
    """
    try:
        found = typed(kind, config)
    except ValueError as e:
        refuse(str(e))
    given = {f.name: getattr(found, f.name) for f in fields(kind)}  # type: ignore[arg-type]
    faults = [fault for name, value in given.items() for fault in _faults(name, value, least or {})]
    for name, known in (choices or {}).items():
        texts = given[name] if isinstance(given[name], list) else [given[name]]
        faults += [f"{name}={text}: expected one of {', '.join(known)}" for text in texts if text not in known]
    if faults:
        refuse("; ".join(faults))
    return found


def _faults(name: str, value: Any, least: Mapping[str, float]) -> list[str]:
    if isinstance(value, list):
        return [fault for v in value for fault in _faults(name, v, least)]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return []
    if name in least or isinstance(value, int):
        limit = least.get(name, 1)
        return [] if value >= limit else [f"{name}={value}: must be at least {limit:g}"]
    return [] if 0 < value < float("inf") else [f"{name}={value}: must be a number above 0"]


def count(text: str) -> int:
    """Of argparse: a whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return number
