"""What is wrong with overrides such as ``case=x``, one line each: Hydra's own words run over several and tell of sweeps.

Before Hydra composes anything; used by launch/compose.py and by the command lines of benchmarks. Must not import megasync,
Megatron or transformers.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Sequence
from dataclasses import fields
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launch.choices import schema_of

_ASSIGNED = re.compile(r"[+]{0,2}[^\s=+~]+=")
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def read(override: str) -> Override | str:
    """One override as Hydra reads it, or what is wrong with its text."""
    try:
        found = OverridesParser.create().parse_override(override)
    except HydraException as e:
        if not _ASSIGNED.match(override):
            return f"{override!r}: expected NAME=VALUE"
        why = " ".join(str(e).split("\n")[0].split())
        return f"{override}: Hydra cannot read the value ({why}): a text is quoted twice: {_quoted(override)}"
    if found.is_sweep_override():
        listed = shlex.quote("{}=[{}]".format(*override.split("=", 1)))
        return (
            f"{override}: Hydra takes this for several values, and one is expected: a text with commas is quoted twice: "
            f"{_quoted(override)}; a list has brackets: {listed}"
        )
    return found


def unreadable(overrides: Sequence[str]) -> list[str]:
    """What is wrong with the texts of overrides, whatever the settings are; those of Hydra itself are left to it."""
    return [fault for o in overrides if not _is_hydra(o) and isinstance(fault := read(o), str)]


def faults_of(kind: type, overrides: Sequence[str]) -> list[str]:
    """What is wrong with overrides of a settings class without groups.

    Args:
        kind: A dataclass of plain fields and lists.
        overrides: The arguments of a command line, no options among them.

    Returns:
        Texts that cannot be read, names that the class does not have and values of another type.
    """
    hints = get_type_hints(kind)
    names = [f.name for f in fields(kind)]
    schema = OmegaConf.structured(schema_of(kind))
    faults: list[str] = []
    for override in overrides:
        if _is_hydra(override):
            continue
        found = read(override)
        if isinstance(found, str):
            faults.append(found)
            continue
        key = found.key_or_group + (f"@{found.package}" if found.package else "")
        if key not in names:
            near = difflib.get_close_matches(key, names, 1)
            meant = f"; did you mean {near[0]}?" if near else ""
            faults.append(f"{override}: there is no setting {key!r}; known: {', '.join(names)}{meant}")
        elif found.is_delete() or found.is_add():
            faults.append(f"{override}: expected {key}=VALUE, without a sign before it")
        else:
            try:
                OmegaConf.update(schema, key, found.value())
            except OmegaConfBaseException:
                faults.append(f"{override}: expected {_said(hints[key])}")
    return faults


def _is_hydra(override: str) -> bool:
    return override.lstrip("+~").startswith(("hydra.", "hydra/"))


def _quoted(override: str) -> str:
    """An override for a shell that gives Hydra one text."""
    key, value = override.split("=", 1)
    # Hydra's backslashes escape before a quote only.
    escaped = re.sub(r'(\\*)("|$)', lambda m: m[1] * 2 + ('\\"' if m[2] else ""), value)
    return shlex.quote(f'{key}="{escaped}"')


def _said(hint: Any) -> str:
    """A type in words."""
    if get_origin(hint) is list:
        return f"a list, [A,B], each {_said(get_args(hint)[0])}"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(str(m.value) for m in hint)}"
    return _KINDS.get(hint, str(hint))
