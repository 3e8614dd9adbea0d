"""Composes the settings from configs/ with Hydra; every process of a run does it, with the same overrides.

A key that launch/settings.py does not have is an error here. Besides the entry points only this module and overrides import Hydra.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launch.checks import check
from launch.choices import schema_of, typed
from launch.overrides import unreadable
from launch.settings import Settings

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def register() -> None:
    """Make ``Settings`` the schema ``settings`` of Hydra's configuration store."""
    ConfigStore.instance().store(name="settings", node=schema_of(Settings))


def compose(overrides: Sequence[str] = ()) -> Settings:
    """Compose the configuration as Hydra's command line does.

    Args:
        overrides: Such as ``parallel=pp2`` or ``publish.every=2``.

    Raises:
        ValueError: A key, a choice or a value that is not known; the message says what is.
    """
    register()
    if faults := unreadable(overrides):
        raise ValueError("; ".join(faults))
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return settings_of(hydra_compose("main", list(overrides)))
    except (HydraException, OmegaConfBaseException) as e:
        raise ValueError(_explain(e, overrides)) from e


def settings_of(config: Any) -> Settings:
    """The typed settings of what Hydra composed.

    Raises:
        ValueError: An added key (``+key=value``) that no setting has, a text that is no member of an Enum, or a value that a
            dataclass refuses.
    """
    # Hydra lets a plus sign add keys to any schema; nothing here would ever read them.
    if added := _names(OmegaConf.to_container(config, resolve=False)) - _known():
        raise ValueError("\n".join(_nearest(key) for key in sorted(added)))
    found = typed(Settings, config)
    if found.sign_key:
        key = found.sign_key.encode()
        found.publish = replace(found.publish, sign_key=key)
        found.apply = replace(found.apply, sign_key=key)
    return found


def refuse(overrides: Sequence[str], world_size: int | None = None) -> str:
    """What is wrong with a command line, before Hydra and anything else is started; empty where it can run.

    Makes the output folder, which is what shows that it can be made.

    Args:
        overrides: The arguments. With one of Hydra's own (``--help``, ``--cfg job``) among them nothing is looked at.
        world_size: Ranks that were started; see ``checks.check``.
    """
    if any(o.startswith("-") for o in overrides):
        return ""
    try:
        s = check(compose(overrides), world_size)
    except ValueError as e:
        return str(e)
    try:
        Path(s.out).mkdir(parents=True, exist_ok=True)  # as Hydra would, which ends in a traceback where it cannot
    except OSError as e:
        return unusable(s.out, e)
    return ""


def unusable(out: str, error: OSError) -> str:
    """What to say of an output folder that cannot be made or cleared."""
    return f"out={out}: {error.strerror or error} ({error.filename or out}): give a folder that can be written to"


def _explain(error: Exception, overrides: Sequence[str]) -> str:
    """Hydra's words on one line, without its advice to append keys and without where it searched, and the nearest known keys."""
    told = [str(error).split("\nTo append")[0].split("\nConfig search path")[0]]
    if error.__cause__ is not None:
        told.append(str(error.__cause__).split("\n")[0])
    for override in overrides:
        key = override.split("=", 1)[0].lstrip("+~").split("@", 1)[0]
        if key in ("publish.sign_key", "apply.sign_key"):
            told.append("set sign_key=<TEXT>, which both ends take")
        elif key not in _known() and not (CONFIGS / key).is_dir():
            told.append(_nearest(key))
    return " ".join("; ".join(dict.fromkeys(told)).split())


def _nearest(key: str) -> str:
    known = sorted(_known())
    near = difflib.get_close_matches(key, known, 3, 0.5) or [k for k in known if k.startswith(key.split(".")[0])]
    meant = f"did you mean {', '.join(near)}?" if near else "all are in launch/settings.py"
    return f"{key!r} is not a setting; {meant}"


@cache
def _known() -> set[str]:
    return _names(asdict(Settings()))


def _names(node: Any, at: str = "") -> set[str]:
    """Full names of the leaves of a nested mapping."""
    if not isinstance(node, dict):
        return {at}
    return {name for key, value in node.items() for name in _names(value, f"{at}.{key}" if at else str(key))}
