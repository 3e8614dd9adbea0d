"""Both configurations: texts become choices, everything else that does not fit is refused with what would."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from megasync.config import (
    MAX_WAIT_S,
    ApplyConfig,
    FirstDifference,
    GatherKind,
    OnError,
    PublishConfig,
    SnapshotPlace,
    Staging,
    WhenFull,
    config_of,
)

Kind = type[PublishConfig] | type[ApplyConfig]
CHOICES: list[tuple[Kind, str, Any]] = [
    (PublishConfig, "snapshot", SnapshotPlace),
    (PublishConfig, "gather", GatherKind),
    (PublishConfig, "when_full", WhenFull),
    (PublishConfig, "on_error", OnError),
    (PublishConfig, "first_difference", FirstDifference),
    (ApplyConfig, "staging", Staging),
]
NAN, INF = float("nan"), float("inf")
SECONDS = [-1, 0, NAN, INF, 1e30, 10**400, True, "1", None, MAX_WAIT_S * 1.01]
COUNTS = [-1, 1.5, 2.0, "2", None, True, 10**30, NAN]
WRONG: list[tuple[Kind, str, list[Any]]] = [
    (PublishConfig, "run", [5, None, "", b"r"]),
    (PublishConfig, "every", [0, *COUNTS]),
    (PublishConfig, "codec", [5, None, ""]),
    (PublishConfig, "num_writers", [0, *COUNTS]),
    (PublishConfig, "in_flight_limit", [0, 10**9, *COUNTS]),
    (PublishConfig, "max_failures", COUNTS),
    (PublishConfig, "check_replicas_every", COUNTS),
    (PublishConfig, "timeout_s", SECONDS),
    (PublishConfig, "give_up_s", SECONDS),
    (PublishConfig, "max_first_density", [0, -0.1, 1.01, NAN, INF, True, "0.5", None]),
    (PublishConfig, "sign_key", ["text", None, 5, [1]]),
    (PublishConfig, "check_memory", [1, 0, None, "yes"]),
    (ApplyConfig, "run", [5, None, ""]),
    (ApplyConfig, "workers", [0, 10**6, *COUNTS]),
    (ApplyConfig, "staged_limit_nbytes", COUNTS),
    (ApplyConfig, "shadow_limit_nbytes", COUNTS),
    (ApplyConfig, "timeout_s", SECONDS),
    (ApplyConfig, "poll_s", SECONDS),
    (ApplyConfig, "self_test", [1, None, "no"]),
    (ApplyConfig, "sign_key", ["text", None]),
]


@pytest.mark.parametrize(("kind", "name", "choice"), CHOICES)
def test_texts_become_choices_and_others_are_refused_with_the_list(kind: Kind, name: str, choice: Any) -> None:
    for member in choice:
        assert getattr(kind(**{name: member.value}), name) is member
        assert getattr(kind(**{name: member}), name) is member
    others = [SnapshotPlace.HOST if choice is not SnapshotPlace else GatherKind.GLOO, "x", "", None, 1, True]
    for wrong in others:
        with pytest.raises(ValueError, match=f"{name} is .*, expected one of {', '.join(m.value for m in choice)}"):
            kind(**{name: wrong})


@pytest.mark.parametrize(("kind", "name", "values"), WRONG)
def test_values_that_do_not_fit_are_refused_by_name(kind: Kind, name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"^{kind.__name__}: {name} is .*, expected "):
            kind(**{name: value})


@pytest.mark.parametrize("kind", [PublishConfig, ApplyConfig])
def test_every_field_is_checked(kind: Kind) -> None:
    class Odd:
        pass

    for field in fields(kind):
        with pytest.raises(ValueError, match=f"{kind.__name__}: {field.name} is "):
            kind(**{field.name: Odd()})
    with pytest.raises(TypeError, match="evry"):
        kind(evry=1)  # type: ignore[call-arg]


def test_numbers_of_other_kinds_are_taken_as_what_they_are() -> None:
    made = PublishConfig(every=np.int64(3), timeout_s=5, max_first_density=np.float32(0.5), sign_key=bytearray(b"k"))  # type: ignore[arg-type]
    assert (made.every, made.timeout_s, made.max_first_density, made.sign_key) == (3, 5.0, 0.5, b"k")
    assert [type(x) for x in (made.every, made.timeout_s, made.max_first_density, made.sign_key)] == [
        int,
        float,
        float,
        bytes,
    ]
    assert (
        ApplyConfig(staged_limit_nbytes=0, shadow_limit_nbytes=1 << 40, timeout_s=MAX_WAIT_S).staged_limit_nbytes == 0
    )


def test_all_faults_are_told_at_once_and_no_key_is_shown() -> None:
    with pytest.raises(ValueError, match=r"every is 0.*snapshot is 'foo'.*give_up_s is nan") as e:
        PublishConfig(every=0, snapshot="foo", give_up_s=NAN)  # type: ignore[arg-type]
    assert str(e.value).count("expected") == 3
    with pytest.raises(ValueError, match="check_memory is 6 bytes"):
        PublishConfig(check_memory=b"secret")  # type: ignore[arg-type]


def test_a_configuration_is_one_or_none() -> None:
    assert config_of(PublishConfig, None) == PublishConfig()
    mine = ApplyConfig(workers=2)
    assert config_of(ApplyConfig, mine) is mine
    for wrong in ({}, {"run": "r"}, PublishConfig, PublishConfig(), "r", 0):
        with pytest.raises(TypeError, match="expected ApplyConfig"):
            config_of(ApplyConfig, wrong)
