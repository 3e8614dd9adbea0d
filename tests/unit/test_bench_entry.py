"""Command lines of the benchmarks: a machine without CUDA, and what cannot be measured, are one line and status 2."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from argparse import ArgumentTypeError
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from launch import gpu_follower
from launch.bench.bench_cpu import CpuBench
from launch.bench.bench_deltas import MODELS, DeltaBench
from launch.bench.bench_nvfp4 import Nvfp4Bench
from launch.bench.entry import count, plain_hydra, require_cuda, settings_of
from launch.choices import schema_of
from launch.gpu_megatron import GpuMegatron
from megasync.config import GatherKind, SnapshotPlace

ROOT = Path(__file__).resolve().parents[2]
NEED_NO_GPU = {"cpu", "plan", "deltas", "payload"}
GPU = sorted({p.stem.removeprefix("bench_") for p in (ROOT / "launch/bench").glob("bench_*.py")} - NEED_NO_GPU)


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("arguments", [[name] for name in GPU] + [["peers", "--nvlink"]], ids=" ".join)
def test_a_benchmark_without_cuda_is_one_line(
    arguments: list[str], without_cuda: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *options = arguments
    options = options or (["--child"] if name == "counters" else [])
    module = f"launch.bench.bench_{name}"
    sys.modules.pop(module, None)  # runpy warns of a module that is there already
    monkeypatch.setattr(sys, "argv", [str(ROOT / "launch/bench" / f"bench_{name}.py"), *options])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    said = capsys.readouterr()
    needed = "2 CUDA devices" if options == ["--nvlink"] else "a CUDA device"
    assert ended.value.code == 2
    assert said.out == ""
    assert said.err.startswith(f"bench_{name}: needs {needed}, torch {torch.__version__} (built ")
    assert len(said.err.splitlines()) == 1


def test_hydra_s_own_options_need_no_cuda(without_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for asked in ("--help", "--cfg"):
        monkeypatch.setattr(sys, "argv", ["bench_x.py", asked])
        plain_hydra(CpuBench)
        assert sys.argv[-1] == asked
    monkeypatch.setattr(sys, "argv", ["bench_x.py", "nbytes=1"])
    plain_hydra(CpuBench, cuda=False)
    assert sys.argv[-1] == "nbytes=1"
    with pytest.raises(SystemExit):
        plain_hydra(CpuBench)


def test_a_wrong_call_is_told_before_a_missing_gpu(
    without_cuda: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_x.py", "foo=1", "nbytes=x"])
    with pytest.raises(SystemExit) as ended:
        plain_hydra(CpuBench)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("bench_x: foo=1: there is no setting 'foo'; known: nbytes, densities, ")
    assert said.endswith("; nbytes=x: expected a whole number\n")


def test_as_many_devices_as_are_needed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    require_cuda()
    with pytest.raises(SystemExit):
        require_cuda(2)
    assert "needs 2 CUDA devices, torch" in (said := capsys.readouterr().err)
    assert "finds 1: " in said


def settings(kind: type, *overrides: str, **rules: object) -> object:
    config = OmegaConf.merge(OmegaConf.structured(schema_of(kind)), OmegaConf.from_dotlist(list(overrides)))
    return settings_of(kind, config, **rules)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "overrides", "rules", "said"),
    [
        (CpuBench, ["nbytes=-5"], {}, "nbytes=-5: must be at least 1"),
        (CpuBench, ["densities=[0.1,0]"], {}, "densities=0.0: must be a number above 0"),
        (CpuBench, ["densities=[inf]"], {}, "densities=inf: must be a number above 0"),
        (CpuBench, ["densities=[-0.1]"], {}, "densities=-0.1: must be a number above 0"),
        (CpuBench, ["densities=[0.1,2]"], {"most": {"densities": 0.5}}, "densities=2.0: must be at most 0.5"),
        (CpuBench, ["densities=[nan]"], {"most": {"densities": 0.5}}, "densities=nan: must be a number above 0"),
        (CpuBench, ["densities=[]"], {}, "densities=[]: expected at least one"),
        (CpuBench, ["repeats=0"], {}, "repeats=0: must be at least 1"),
        (CpuBench, ["nbytes=7"], {"least": {"nbytes": 191_414_272}}, "nbytes=7: must be at least 191414272"),
        (CpuBench, ["nbytes=0", "repeats=0"], {}, "nbytes=0: must be at least 1; repeats=0: must be at least 1"),
        (CpuBench, ["nbytes=${x}"], {}, "Interpolation key 'x' not found"),
        (CpuBench, ["codec=zip"], {"choices": {"codec": ["a", "b"]}}, "codec=zip: expected one of a, b"),
        (DeltaBench, ["models=[demo,x]"], {"choices": {"models": MODELS}}, "models=x: expected one of demo, wide, moe"),
        (DeltaBench, ["learn_steps=-1"], {"least": {"learn_steps": 0}}, "learn_steps=-1: must be at least 0"),
        (GpuMegatron, ["gather=ucx"], {}, "gather=ucx: expected one of gloo, nccl, direct"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    kind: type, overrides: list[str], rules: dict[str, object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        settings(kind, *overrides, **rules)
    assert ended.value.code == 2
    assert capsys.readouterr().err.split(": ", 1)[1] == said + "\n"


def test_what_can_be_measured_is_taken_as_it_is() -> None:
    assert settings(CpuBench, "nbytes=5", "densities=[0.25]", "out=x") == CpuBench(5, [0.25], out="x")
    least = {"learn_steps": 0}
    assert settings(DeltaBench, "learn_steps=0", least=least, choices={"models": MODELS}) == DeltaBench(learn_steps=0)
    found = settings(GpuMegatron, "gather=nccl", "snapshot=HOST", "blocks=0", least={"blocks": 0})
    assert settings(Nvfp4Bench, "formulas=[]", empty=("formulas",)) == Nvfp4Bench()
    assert found == GpuMegatron(gather=GatherKind.NCCL, snapshot=SnapshotPlace.HOST, blocks=0)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (["plan", "repeats=x"], "repeats=x: expected a whole number"),
        (["plan", "repeats=${x}"], "Interpolation key 'x' not found"),
        (["plan", "--out", "x"], "--out: settings are given as out=VALUE, without dashes"),
        (["plan", "out="], "out=: an empty path: give a folder"),
        (["plan", "expert=7"], "expert=7 does not divide the 256 experts: "),
        (
            ["cpu", "nbytes=5", "densities=[2]"],
            "nbytes=5: must be at least 191414272; densities=2.0: must be at most 0.5",
        ),
        (["cpu", "out=setup.cfg/x.jsonl", "codec=a,b"], "codec=a,b: Hydra takes this for several values"),
        (["deltas", "spans=[1,64]"], "spans=[64]: a phase has steps=32, so no delta is that long: "),
        (["deltas", "keep={file}"], "keep={file}: {file} is no folder: "),
        (["payload", "nbytes=1", "sweep=[2]"], "nbytes=1: must be at least 1048576; sweep=2.0: must be at most 1.0"),
        (
            ["payload", "only=Z", "sweep=[]", "list_densities=[]"],
            "only=Z: no case begins so; there are A article 0.085%, ",
        ),
        (["payload", "out={file}"], "out={file}: {file} is no folder: "),
        (["engine", "out=x"], "unrecognized arguments: out=x; --help has all options"),
        (["engine", "--layers", "0"], "argument --layers: '0' is no whole number of at least 1"),
        (["engine", "--directory", "{file}"], "argument --directory: {file}: {file} is no folder: "),
        (
            ["end_to_end", "--engine", "--out", "engine-gpu.jsonl"],
            "argument --out: with --engine the rows of bench_engine ",
        ),
        (["end_to_end", "--out", "{file}"], "argument --out: {file}: {file} is no folder: "),
        (["counters", "--out", "{file}"], "argument --out: {file}: {file} is no folder: "),
        (["peers", "--only", "x"], "argument --only: invalid choice: 'x'"),
        (["receiver", "--trace", "x"], "argument --trace: x: expected a file that ends in .json.gz"),
        (["receiver", "--trace", "x.json.gz", "--only", "staging"], "argument --trace: it is made by the part stream"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_a_wrong_call_of_a_benchmark_is_one_line(
    call: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through Hydra, in the order in which a benchmark checks; nothing is made."""
    (tmp_path / "file").write_text("x")
    monkeypatch.chdir(tmp_path)
    name, *arguments = [text.replace("{file}", str(tmp_path / "file")) for text in call]
    module = f"launch.bench.bench_{name}"
    sys.modules.pop(module, None)  # runpy warns of a module that is there already
    monkeypatch.setattr(sys, "argv", [str(ROOT / "launch/bench" / f"bench_{name}.py"), *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    told = capsys.readouterr()
    assert (ended.value.code, told.out) == (2, "")
    assert told.err.startswith(f"bench_{name}: {said.replace('{file}', str(tmp_path / 'file'))}")
    assert len(told.err.splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_every_benchmark_has_one_meaning_of_out() -> None:
    """A benchmark that makes its own path of ``out`` would make a folder of a file's name."""
    for path in [*(ROOT / "launch/bench").glob("bench_*.py"), ROOT / "launch/gpu_report.py"]:
        text = path.read_text()
        assert "result_file(" in text, path
        assert "Path(config.out)" not in text, path
        assert "given.out /" not in text, path


@pytest.mark.parametrize("text", ["0", "-3", "1.5", "x", ""])
def test_counts_of_argparse(text: str) -> None:
    assert count("7") == 7
    with pytest.raises(ArgumentTypeError, match="no whole number of at least 1"):
        count(text)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--only"], 2, "--only wants the NAME of launch/bench/bench_NAME.py: apply audit "),
        (["--only", "--cpu"], 2, "--only wants the NAME"),
        (["--only", "nothing"], 2, "there is no launch/bench/bench_nothing.py; NAME is one of: apply audit "),
        (["--all"], 2, "unknown option --all"),
    ],
)
def test_bench_sh_refuses_with_one_line(arguments: list[str], status: int, said: str) -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "launch/bench.sh"), *arguments], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.startswith("bench: ")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_follower_tells_what_it_wants(
    tmp_path: Path, without_cuda: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(*arguments: str) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", ["gpu_follower.py", *arguments])
        with pytest.raises(SystemExit) as ended:
            gpu_follower.main()
        said = capsys.readouterr()
        return ended.value.code, said.out + said.err

    assert end("--help")[0] == 0
    assert end()[0] == 2
    code, said = end(str(tmp_path))
    assert code == 2
    assert said.startswith(f"gpu_follower: {tmp_path} has no follower.json: start launch/gpu_megatron.py")
    (tmp_path / "follower.json").write_text(json.dumps({"device": "cuda:0"}))
    code, said = end(str(tmp_path))
    assert (code, len(said.splitlines())) == (2, 1)
    assert said.startswith("gpu_follower: needs a CUDA device")
