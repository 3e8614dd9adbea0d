"""What the command lines of all benchmarks share: Hydra's options, settings that cannot work, a machine without CUDA.

Used by the ``main`` and ``__main__`` parts of launch/bench and launch/gpu_*.py. What is refused ends in one line and exit
status 2, before anything is made or measured. Where results go is in places, how overrides are read in launch/overrides.py.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from hydra.core.config_store import ConfigStore
from omegaconf.errors import OmegaConfBaseException

from launch.bench.places import folder_fault, out_fault, trace_fault
from launch.bench.rows import RESULTS
from launch.choices import schema_of, typed
from launch.overrides import faults_of

T = TypeVar("T")

_PLAIN = (
    "hydra.run.dir=.",
    "hydra.output_subdir=null",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
)


def plain_hydra(kind: type, *, cuda: bool = True) -> None:
    """Refuse a wrong call, then put options before the arguments that keep Hydra from making output folders and log files.

    With one of Hydra's own options (``--help``, ``--cfg job``) among the arguments nothing is looked at.

    Args:
        kind: The settings class, which says what the arguments may be.
        cuda: Whether what follows needs a CUDA device; where there is none, this ends the program.
    """
    given = sys.argv[1:]
    names = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    for a in given:
        if (name := a.lstrip("-").split("=")[0].replace("-", "_")) in names and a.startswith("-"):
            refuse(f"{a}: settings are given as {name}=VALUE, without dashes")
    if not any(a.startswith("-") for a in given):
        if faults := faults_of(kind, given):
            refuse("; ".join(faults))
        if cuda:
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
    most: Mapping[str, float] | None = None,
    choices: Mapping[str, Collection[str]] | None = None,
    empty: Collection[str] = (),
    folders: Collection[str] = (),
) -> T:
    """The settings that Hydra composed; what cannot be measured, and what cannot be written, ends the program.

    Args:
        kind: The class that was registered. Its field ``out``, where it has one, says where results go; see places.
        config: What ``hydra.main`` hands over.
        least: Smallest values by field, where that is not 1 (whole numbers) or just above 0 (others).
        most: Largest values by field, where there is one.
        choices: Known texts by field, for fields that are not free text.
        empty: Fields of lists that may have nothing in them.
        folders: Fields of folders that are written to, where they are not empty.
    """
    try:
        found = typed(kind, config)
    except (ValueError, OmegaConfBaseException) as e:
        refuse(str(e).split("\n")[0])
    given = {f.name: getattr(found, f.name) for f in fields(kind)}  # type: ignore[arg-type]
    faults = [fault for name, value in given.items() for fault in _faults(name, value, least or {}, most or {})]
    faults += [f"{name}=[]: expected at least one" for name, v in given.items() if v == [] and name not in empty]
    for name, known in (choices or {}).items():
        texts = given[name] if isinstance(given[name], list) else [given[name]]
        faults += [f"{name}={text}: expected one of {', '.join(known)}" for text in texts if text not in known]
    faults += [fault for name in folders if given[name] and (fault := folder_fault(f"{name}=", given[name]))]
    if "out" in given and os.environ.get("RANK", "0") == "0" and (fault := out_fault("out=", given["out"])):
        faults.append(fault)
    if faults:
        refuse("; ".join(faults))
    return found


def _faults(name: str, value: Any, least: Mapping[str, float], most: Mapping[str, float]) -> list[str]:
    if isinstance(value, list):
        return [fault for v in value for fault in _faults(name, v, least, most)]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return []
    if name in most and value > most[name]:
        return [f"{name}={value}: must be at most {most[name]}"]
    if name in least or isinstance(value, int):
        limit = least.get(name, 1)
        return [] if value >= limit else [f"{name}={value}: must be at least {limit}"]
    return [] if 0 < value < float("inf") else [f"{name}={value}: must be a number above 0"]


class Parser(argparse.ArgumentParser):
    """For benchmarks with options of their own: ``--out``, and one line for a wrong call.

    Args:
        about: The module's text.
        results: Whether there is an ``--out``.
    """

    def __init__(self, about: str | None, *, results: bool = True) -> None:
        super().__init__(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
        if not results:
            return
        where = "folder of the results, or the file of the rows, which ends in .jsonl (default: launch/bench/results)"
        self.add_argument("--out", type=out_place, default=RESULTS, help=where)

    def error(self, message: str) -> NoReturn:
        """Without the usage, which ``--help`` has."""
        refuse(f"{message}; --help has all options")


def _path(fault_of: Callable[[str, str], str], text: str) -> Path:
    if fault := fault_of("", text):
        raise argparse.ArgumentTypeError(fault)
    return Path(text)


def out_place(text: str) -> Path:
    """Of argparse: where results go; see places."""
    return _path(out_fault, text)


def folder(text: str) -> Path:
    """Of argparse: a folder that files can be made in; it need not be there yet."""
    return _path(folder_fault, text)


def trace(text: str) -> Path:
    """Of argparse: a file for a trace."""
    return _path(trace_fault, text)


def count(text: str) -> int:
    """Of argparse: a whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return number
