"""Overrides that cannot be: each is one line that says what was given, what is expected and how to write it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field

import pytest

from launch.compose import compose
from launch.gpu_megatron import GpuMegatron
from launch.overrides import faults_of, read, unreadable
from megasync.config import GatherKind


@dataclass
class Bench:
    """Of every kind of field that benchmarks have."""

    num: int = 1
    share: float = 0.5
    case: str = "one"
    densities: list[float] = field(default_factory=lambda: [0.1])
    models: list[str] = field(default_factory=list)
    pinned: bool = False
    gather: GatherKind = GatherKind.GLOO


KNOWN = "known: num, share, case, densities, models, pinned, gather"


def test_what_fits_is_no_fault() -> None:
    fits = [
        "num=3",
        "++num=3",
        "share=2",
        "share=1e-3",
        "case=",
        "case=dp2",
        "case='dp2, NCCL'",
        'case="a=b"',
        "densities=[0.1,1]",
    ]
    fits += ["densities=[]", "models=[a,b]", "pinned=true", "gather=nccl", "gather=NCCL", "case=5", "hydra.run.dir=x"]
    assert faults_of(Bench, fits) == []


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("foo=1", f"foo=1: there is no setting 'foo'; {KNOWN}"),
        ("density=[1]", f"density=[1]: there is no setting 'density'; {KNOWN}; did you mean densities?"),
        ("case@num=1", f"case@num=1: there is no setting 'case@num'; {KNOWN}; did you mean case?"),
        ("case.x=1", f"case.x=1: there is no setting 'case.x'; {KNOWN}; did you mean case?"),
        ("+num=2", "+num=2: expected num=VALUE, without a sign before it"),
        ("~num", "~num: expected num=VALUE, without a sign before it"),
        ("num", "'num': expected NAME=VALUE"),
        ("", "'': expected NAME=VALUE"),
        (" num=2", "' num=2': expected NAME=VALUE"),
        ("num=x", "num=x: expected a whole number"),
        ("num=1.5", "num=1.5: expected a whole number"),
        ("num=null", "num=null: expected a whole number"),
        ("num=[1]", "num=[1]: expected a whole number"),
        ("share=x", "share=x: expected a number"),
        ("pinned=5x", "pinned=5x: expected true or false"),
        ("case=[a]", "case=[a]: expected a text"),
        ("case={a: 1}", "case={a: 1}: expected a text"),
        ("densities=0.1", "densities=0.1: expected a list, [A,B], each a number"),
        ("densities=[x]", "densities=[x]: expected a list, [A,B], each a number"),
    ],
)
def test_what_does_not_fit_is_one_line(override: str, said: str) -> None:
    assert faults_of(Bench, [override]) == [said]


@pytest.mark.parametrize(
    "value",
    ["dp2, NCCL", "a,b", "a=b", "dp2 (x)", '5" disk, old', "it's, well", "a\\b, c", "a,\\", 'a\\", b', "range(1,3)"],
)
def test_a_text_that_hydra_cannot_take_is_told_with_its_quotes_and_those_work(value: str) -> None:
    (fault,) = faults_of(Bench, [f"case={value}"])
    assert fault.startswith(f"case={value}: Hydra ")
    assert len(fault.splitlines()) == 1
    told = fault.split("quoted twice: ", 1)[1].split("; a list", 1)[0]
    (quoted,) = shlex.split(told)
    found = read(quoted)
    assert not isinstance(found, str)
    assert found.value() == value


def test_a_list_without_brackets_is_told_with_them() -> None:
    (fault,) = faults_of(Bench, ["densities=0.1,0.2"])
    (written,) = shlex.split(fault.split("a list has brackets: ", 1)[1])
    assert written == "densities=[0.1,0.2]"
    assert faults_of(Bench, [written]) == []


def test_all_faults_of_a_command_line_are_told() -> None:
    assert len(faults_of(GpuMegatron, ["case=dp2, NCCL", "tp=x", "foo=1", "tp=2"])) == 3
    assert len(unreadable(["run=a,b", "demo.seed=2", "x", "hydra.x=1,2"])) == 2


def test_the_main_job_tells_of_quotes_too() -> None:
    with pytest.raises(ValueError, match=r"^run=a, b: Hydra takes this for several values.*'run=\"a, b\"'; a list"):
        compose(["run=a, b"])
