"""Every choice of configs/ composes and is accepted or refused as it should be; what cannot work fails with its fix."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.check import main
from launch.checks import check
from launch.compose import CONFIGS, compose, refuse
from launch.demo.report import main as make_report
from launch.settings import Settings, episodes
from megasync.codecs.choice import check_codec, codec_names
from megasync.config import GatherKind, OnError, SnapshotPlace

GROUPS = ("model", "parallel", "codec", "snapshot", "gather", "sink", "engine", "demo")
CHOICES = [(g, p.stem) for g in GROUPS for p in sorted((CONFIGS / g).glob("*.yaml"))]
COMPANIONS = {"ep2": ["model=tiny_moe"], "tiny_moe": ["parallel=ep2"], "pp2_vpp2": ["model.num_layers=4"]}
NEED_CUDA = {("snapshot", "device"), ("gather", "nccl")}


def test_every_file_belongs_to_a_known_group() -> None:
    files = {p.relative_to(CONFIGS).as_posix() for p in CONFIGS.rglob("*.yaml")}
    assert files == {"main.yaml"} | {f"{g}/{name}.yaml" for g, name in CHOICES}
    assert {g for g, _ in CHOICES} == set(GROUPS)


@pytest.mark.parametrize(("group", "name"), CHOICES)
def test_every_choice_composes(group: str, name: str) -> None:
    s = compose([f"{group}={name}", *COMPANIONS.get(name, [])])
    check_codec(s.publish.codec)
    if (group, name) in NEED_CUDA:
        with pytest.raises(ValueError, match=f"{group}={name} needs CUDA devices.* take {group}="):
            check(s)
    else:
        assert check(s) is s


def test_every_codec_has_a_file() -> None:
    assert {n for g, n in CHOICES if g == "codec"} == set(codec_names())


@pytest.mark.parametrize("name", [n for g, n in CHOICES if g == "codec"])
def test_a_codec_file_is_named_after_its_codec(name: str) -> None:
    assert compose([f"codec={name}"]).publish.codec == name


def test_what_the_defaults_are() -> None:
    s = compose()
    assert (s.parallel.ranks, s.parallel.tp, s.parallel.dp) == (4, 2, 2)
    assert (s.publish.codec, s.publish.gather, s.publish.snapshot) == ("sparse", GatherKind.GLOO, SnapshotPlace.HOST)
    assert s.demo.fine_lr == 1e-6
    assert s.sink.url == "outputs/demo/sink"
    assert s.publish.run == s.apply.run == s.run


def test_overrides_reach_both_sides() -> None:
    s = compose(["run=mine", "out=/data/x", "publish.every=3", "publish.on_error=RETRY", "apply.workers=2"])
    assert (s.publish.run, s.apply.run, s.sink.url) == ("mine", "mine", "/data/x/sink")
    assert (s.publish.every, s.publish.on_error, s.apply.workers) == (3, OnError.RETRY, 2)
    assert [(e.run, e.apply, e.num_steps) for e in episodes(s)] == [
        ("mine-control", False, s.demo.control_steps),
        ("mine", True, s.demo.learn_steps + s.demo.fine_steps),
    ]
    assert [e.run for e in episodes(compose(["demo.control_steps=0"]))] == ["demo"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("publish.evry=3", "did you mean publish.every"),
        ("+publish.evry=3", "did you mean publish.every"),
        ("demo.digit=4", "did you mean demo.digits"),
        ("parallel=tp9", "tp2_dp2"),
        ("codec=zip", "snappy"),
        ("parallel.tp=two", "could not be converted to Integer"),
        ("publish.gather=ucx", "publish.gather=ucx: expected one of gloo, nccl, direct$"),
        ("apply.staging=null", "apply.staging"),
        ("publish.every=0", "every is 0, expected a whole number, at least 1"),
        ("apply.poll_s=0", "poll_s is 0.0, expected seconds, above 0"),
    ],
)
def test_unknown_keys_and_values_fail_when_composed(override: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        compose([override])


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (["model.lora_rank=8"], "set model.lora_rank=0"),
        (["sink.url=null"], "sink=local, or sink.url="),
        (["~sink"], "sink=local, or sink.url="),
        (["sink.url=memory://x"], "take a directory or an object store"),
        (["engine.colocated=true"], "set engine.colocated=false"),
        (["engine.kind=vllm"], "engine=hugging_face"),
        (["gather=nccl"], "take gather=gloo"),
        (["publish.num_writers=9"], "lower it"),
        (
            ["parallel.ranks=6", "parallel.tp=2", "parallel.pp=2"],
            "tp 2 x pp 2 x cp 1 = 4 does not divide the 6 ranks: start 4",
        ),
        (["parallel=ep2"], "take model=tiny_moe"),
        (["parallel=pp2_vpp2"], "add layers, or take fewer stages"),
        (["parallel.tp=4"], "model.num_groups=2 is not a multiple of parallel.tp=4"),
        (["parallel.sequence_parallel=true", "parallel.tp=1"], "set it to false, or tp to 2"),
        (["model=tiny_moe"], "need parallel.sequence_parallel=true"),
        (["model=tiny_moe", "parallel.ep=2", "parallel.etp=2"], "set parallel.etp=1"),
        (["model=tiny_moe", "parallel.ep=4", "parallel.ranks=2"], "ep 4 x etp 1 does not divide the 2 ranks"),
        (["parallel.chunks=2"], "needs pp > 1"),
        (["parallel.tp=0"], "every size must be at least 1"),
        (["demo.num_prompts=7"], "make demo.num_prompts a multiple of 2"),
        (["demo.num_samples=1"], "at least 2"),
        (["demo.learn_steps=0"], "demo.learn_steps=0: must be at least 1"),
        (["model.vocab_size=8"], "the task has 12 tokens"),
        (["model.hf=Qwen3Moe"], "take one of Llama with llama"),
        (["model.num_experts=4"], "experts need Qwen3Moe"),
        (["publish.codec=foo"], "take one of sparse, stored, zstd"),
        (["publish.codec=anchor"], "codec 'anchor' cannot be chosen"),
        (["apply.run=other"], "both ends follow run=demo; set run=<NAME>"),
        (["publish.run=other"], "both ends follow run=demo; set run=<NAME>"),
        (["run=a/b"], "run=a/b: run name"),
        (["demo.digits=0"], "demo.digits=0: must be at least 1"),
        (["demo.digits=99"], "demo.digits=99: must be at least 1 and at most 32"),
        (["demo.num_prompts=0"], "demo.num_prompts=0: must be at least 1"),
        (["demo.seed=-1"], "demo.seed=-1: must be at least 0"),
        (["demo.patience_s=-1"], "demo.patience_s=-1.0: must be"),
        (["demo.patience_s=nan"], "demo.patience_s=nan: must be"),
        (["demo.learn_lr=inf"], "demo.learn_lr=inf: must be"),
        (["demo.show_every=0"], "demo.show_every=0: must be at least 1"),
        (["model.num_groups=3", "parallel=dp2"], "num_heads=4 is not a multiple of model.num_groups=3"),
        (["model.hidden_size=0"], "model.hidden_size=0: every size must be at least 1"),
        (["model.num_groups=0"], "model.num_groups=0: every size must be at least 1"),
        (["model.head_dim=15"], "model.head_dim=15: rotary"),
        (["model.init_std=nan"], "model.init_std=nan: a deviation above 0"),
        (["model=tiny_moe", "parallel=ep2", "model.top_k=5"], "model.top_k=5 with num_experts=4"),
        (["engine.backend=foo"], "engine.backend=foo: on the CPU take one of auto, cpu, mask"),
        (["engine.backend=scatter"], "on the CPU take one of auto, cpu, mask"),
    ],
)
def test_case_72_combinations_that_cannot_work_are_refused_with_the_fix(overrides: list[str], fix: str) -> None:
    with pytest.raises(ValueError, match="this configuration cannot run") as caught:
        check(compose(overrides))
    assert fix in str(caught.value)


def test_case_72_gather_direct_has_no_number_of_writers() -> None:
    with pytest.raises(ValueError, match=r"num_writers means nothing with gather=direct.* leave it at 1"):
        compose(["gather=direct", "publish.num_writers=2"])


def test_case_72_all_faults_are_told_at_once() -> None:
    with pytest.raises(ValueError, match="cannot run") as caught:
        check(compose(["model.lora_rank=8", "sink.url=null", "gather=nccl"]))
    assert str(caught.value).count("\n  - ") == 3


def test_ranks_that_were_started_must_be_those_of_the_configuration() -> None:
    s = compose()
    assert check(s, 4) is s
    with pytest.raises(ValueError, match="does not divide the 3 ranks"):
        check(s, 3)
    with pytest.raises(ValueError, match=r"parallel\.ranks=4, but 8 ranks were started"):
        check(s, 8)


def test_check_makes_the_folder_ready_and_removes_only_what_a_run_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    (out / "sink" / "demo").mkdir(parents=True)
    (out / "report.json").write_text("{}")
    (out / "notes.txt").write_text("mine")
    assert main([f"out={out}", "parallel=tp2"]) == 2
    assert "holds sink, report.json, which no demo put there" in capsys.readouterr().err
    assert (out / "sink" / "demo").is_dir()
    (out / ".megasync-demo").touch()
    assert main([f"out={out}", "parallel=tp2"]) == 0
    assert capsys.readouterr().out == f"2 {out}\n"
    assert sorted(p.name for p in out.iterdir()) == [".megasync-demo", "notes.txt"]


@pytest.mark.parametrize("out", ["", '" "'])
def test_check_takes_no_empty_folder_for_the_one_where_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], out: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sink").mkdir()
    assert main([f"out={out}"]) == 2
    assert "out is empty, expected a folder: is a variable of the shell not set?" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["sink"]


def test_check_says_what_is_wrong_and_touches_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"out={tmp_path / 'out'}", "sink.url=null"]) == 2
    assert "no sink" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_settings_are_documented() -> None:
    """Every field of every settings class is named in its docstring."""
    for cls in (
        Settings,
        *(type(getattr(Settings(), name)) for name in ("model", "parallel", "sink", "engine", "demo")),
    ):
        missing = [f for f in cls.__dataclass_fields__ if f"    {f}: " not in (cls.__doc__ or "")]
        assert not missing, (cls.__name__, missing)


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("publish.timeout_s=nan", "timeout_s is nan, expected seconds"),
        ("publish.sign_key=TEXT", "set sign_key=<TEXT>, which both ends take"),
        ("demo.digitz=3", "did you mean demo.digits"),
        ("demo.digits=99", "must be at least 1 and at most 32"),
        ("model=nope", "Available options in 'model': tiny_llama tiny_moe tiny_qwen3"),
    ],
)
def test_every_process_refuses_a_command_line_with_one_line(override: str, fix: str, tmp_path: Path) -> None:
    for world_size in (None, 4):  # rollout.py, and a rank of train.py
        told = refuse([override], world_size)
        assert fix in told
        assert "\n" not in told
    assert refuse([override, "--help"]) == ""
    assert refuse([f"out={tmp_path}"]) == ""
    assert "parallel.ranks=4, but 2 ranks were started" in refuse([], 2)


def test_an_output_folder_that_cannot_be_made_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    out = f"out={tmp_path / 'file' / 'out'}"
    assert refuse([out]).startswith(f"{out}: Not a directory")
    assert main([out]) == 2
    assert capsys.readouterr().err.strip() == refuse([out])
    assert make_report([f"out={tmp_path / 'none'}"]) == 2
    assert "No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize("script", ["rollout.py", "train.py"])
def test_a_process_that_cannot_run_says_so_without_a_traceback(script: str, tmp_path: Path) -> None:
    path = Path(__file__).resolve().parents[2] / "launch" / script
    done = subprocess.run(
        [sys.executable, str(path), "demo.digits=0", f"out={tmp_path}"],
        capture_output=True,
        text=True,
        env={**os.environ, "WORLD_SIZE": "4", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "failed: this configuration cannot run: demo.digits=0: must be at least 1" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_one_key_signs_on_both_ends() -> None:
    s = check(compose(["sign_key=hello"]))
    assert (s.publish.sign_key, s.apply.sign_key) == (b"hello", b"hello")
    assert check(compose([])).publish.sign_key == b""
