"""Settings with Enums: Hydra takes values and names, and what no Enum has is told with the values."""

from __future__ import annotations

import sys
from dataclasses import FrozenInstanceError, dataclass, field
from enum import Enum
from importlib import import_module
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore
from omegaconf import EnumNode, OmegaConf

from launch.choices import schema_of, typed
from launch.compose import compose
from launch.settings import Settings
from megasync.config import ApplyConfig, FirstDifference, GatherKind, OnError, PublishConfig, SnapshotPlace, WhenFull

BENCH = Path(__file__).resolve().parents[2] / "launch" / "bench"
ENUMS = [
    (part, name, member)
    for part, config in (("publish", PublishConfig()), ("apply", ApplyConfig()))
    for name in config.__dataclass_fields__
    if isinstance(default := getattr(config, name), Enum)
    for member in type(default)
]


class Kind(Enum):
    ONE = "one"
    TWO = 2
    one_ = "ONE"


@dataclass(frozen=True, slots=True)
class Inner:
    kind: Kind = Kind.TWO
    size: int = 3


@dataclass
class Outer:
    inner: Inner = Inner(Kind.ONE)
    maybe: Kind | None = None
    some: list[Kind] = field(default_factory=lambda: [Kind.ONE, Kind.TWO])
    named: dict[str, Kind] = field(default_factory=lambda: {"a": Kind.TWO})
    plain: list[float] = field(default_factory=lambda: [0.5])
    text: str = "t"


def made(*overrides: str) -> Outer:
    base = OmegaConf.structured(schema_of(Outer))
    return typed(Outer, OmegaConf.merge(base, OmegaConf.from_dotlist(list(overrides))))


def test_defaults_are_those_of_the_class() -> None:
    assert made() == Outer()
    with pytest.raises(FrozenInstanceError):
        made().inner.size = 4  # type: ignore[misc]


def test_values_and_names_are_taken_anywhere() -> None:
    found = made("inner.kind=one", "maybe=TWO", "some=[2,ONE,one,TWO]", "named.b=one", "inner.size=7")
    assert found.inner == Inner(Kind.ONE, 7)
    assert found.maybe is Kind.TWO
    # "ONE" is the value of one member and the name of another: the value is meant.
    assert found.some == [Kind.TWO, Kind.one_, Kind.ONE, Kind.TWO]
    assert found.named == {"a": Kind.TWO, "b": Kind.ONE}


def test_what_is_unknown_is_told_with_the_values_all_at_once() -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        made("inner.kind=three", "some=[one,x]", "named.c=y")
    assert str(caught.value) == (
        "inner.kind=three: expected one of one, 2, ONE; some[1]=x: expected one of one, 2, ONE; "
        "named.c=y: expected one of one, 2, ONE"
    )


@pytest.mark.parametrize(("part", "name", "member"), ENUMS, ids=str)
def test_every_enum_of_both_ends_takes_value_and_name(part: str, name: str, member: Enum) -> None:
    base = OmegaConf.structured(schema_of(Settings))
    writers = ["publish.num_writers=1"]
    for text in (member.value, member.name):
        config = OmegaConf.merge(base, OmegaConf.from_dotlist([f"{part}.{name}={text}", *writers]))
        assert getattr(getattr(typed(Settings, config), part), name) is member


def test_through_hydra() -> None:
    s = compose(
        ["publish.when_full=skip", "publish.on_error=RETRY", "publish.first_difference=refuse", "gather=direct"]
    )
    assert (s.publish.when_full, s.publish.on_error) == (WhenFull.SKIP, OnError.RETRY)
    assert (s.publish.first_difference, s.publish.gather) == (FirstDifference.REFUSE, GatherKind.DIRECT)
    assert s.publish.snapshot is SnapshotPlace.HOST
    with pytest.raises(
        ValueError, match=r"publish\.snapshot=disk: expected one of host, device; apply\.staging=slow: "
    ):
        compose(["publish.snapshot=disk", "apply.staging=slow"])


def test_no_schema_of_launch_asks_hydra_for_names() -> None:
    """Whoever adds an Enum to a benchmark's settings gets values too."""
    for path in [*BENCH.glob("bench_*.py"), BENCH.parent / "gpu_megatron.py"]:
        import_module(".".join(path.relative_to(BENCH.parents[1]).with_suffix("").parts))
    compose()
    stored = {n: v.node for n, v in ConfigStore.instance().repo.items() if n.startswith(("bench_", "gpu_", "settings"))}
    assert {"gpu_megatron.yaml", "settings.yaml", "bench_cpu.yaml"} <= stored.keys()
    assert "launch.gpu_megatron" in sys.modules
    asking = {name for name, node in stored.items() if _enums(node)}
    assert not asking, "store it by launch.bench.entry.register"


def _enums(node: object) -> list[object]:
    if isinstance(node, EnumNode):
        return [node]
    if OmegaConf.is_dict(node):
        return [found for key in node for found in _enums(node._get_node(key))]
    return [found for i in range(len(node)) for found in _enums(node._get_node(i))] if OmegaConf.is_list(node) else []
