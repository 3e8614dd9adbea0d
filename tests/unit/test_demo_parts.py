"""Parts of the demo, each alone: the task, the sample folder, BF16 weights in FP32 memory, and what the report calls a failure."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launch.compose import compose
from launch.demo import report as demo_report
from launch.demo.bf16 import Bf16Exporter, MasterWeights
from launch.demo.full_gather import sha256_of
from launch.demo.picture import draw
from launch.demo.progress import Progress
from launch.demo.published import still_there
from launch.demo.samples import Made, SampleFolder, Samples
from launch.demo.sorting import Sorting, advantages
from launch.settings import Settings
from megasync.adapters.torch_trainer import TensorExporter
from megasync.errors import PlanError, RetryError
from megasync.sinks.local import LocalSink
from megasync.trainer.mask import words_of
from megasync.versions.head import claim
from megasync.versions.publication import PublicationReader

MADE = Made(3, 0.5, "ab", 0.01, 100, 0.002)


def test_rewards_count_right_positions() -> None:
    task = Sorting(5)
    prompts = torch.tensor([[3, 1, 2, 9, 1, 10]])
    assert task.solved(prompts).tolist() == [[3, 1, 2, 9, 1, 10, 1, 1, 2, 3, 9]]
    tries = torch.tensor([[1, 1, 2, 3, 9], [1, 1, 3, 2, 9], [9, 3, 2, 1, 1], [11, 1, 15, 0, 9]])
    found = task.rewards(torch.cat([prompts.expand(4, -1), tries], dim=1))
    torch.testing.assert_close(found, torch.tensor([1.0, 0.6, 0.2, 0.4]))


def test_loss_weights_lie_on_the_answer_and_average_it() -> None:
    task = Sorting(2)
    weights = task.loss_weights(torch.tensor([1.0, -0.5]), 8)
    assert (weights != 0).nonzero()[:, 1].tolist() == [2, 3, 2, 3]  # predict tokens 3 and 4, behind the separator
    losses = torch.arange(8.0).expand(2, -1)
    torch.testing.assert_close((losses * weights).mean(dim=1), torch.tensor([2.5, -1.25]))
    assert task.padded(torch.zeros(1, 5, dtype=torch.int64), 8).tolist() == [[0] * 5 + [11] * 4]


def test_advantages_compare_samples_of_one_prompt_only() -> None:
    found = advantages(torch.tensor([0.0, 1.0, 0.5, 0.5]), 2)
    torch.testing.assert_close(found, torch.tensor([-0.7071, 0.7071, 0.0, 0.0]), atol=1e-3, rtol=0)


def test_a_batch_is_handed_over_when_the_trainer_takes_it(tmp_path: Path) -> None:
    ours, theirs = SampleFolder(tmp_path, 10.0), SampleFolder(tmp_path, 10.0)
    sent = Samples(torch.arange(22).view(2, 11), torch.tensor([0.2, 1.0]), MADE)
    with ThreadPoolExecutor(1) as pool:
        putting = pool.submit(ours.put, 7, sent)
        found = theirs.take(7)
        putting.result()
    assert torch.equal(found.tokens, sent.tokens)
    assert torch.equal(found.rewards, sent.rewards)
    assert found.made == MADE
    assert list(tmp_path.iterdir()) == []
    assert ours.last_version() is None
    theirs.finish(12)
    assert ours.last_version() == 12


def test_a_process_that_never_answers_is_named(tmp_path: Path) -> None:
    folder = SampleFolder(tmp_path, 0.01)
    with pytest.raises(TimeoutError, match="for the rollout process to make batch 0"):
        folder.take(0)
    with pytest.raises(TimeoutError, match="for the trainer to take batch 1"):
        folder.put(1, Samples(torch.zeros(1, 1), torch.zeros(1), MADE))


def test_a_wait_that_is_in_vain_says_why_and_not_that_the_other_process_is_at_fault(tmp_path: Path) -> None:
    asked: list[int] = []

    def check() -> None:
        asked.append(1)
        raise RetryError("the sink is gone")

    folder = SampleFolder(tmp_path, 0.01, check)
    with pytest.raises(RetryError, match="the sink is gone"):
        folder.take(0)
    assert asked == [1]
    folder.wait(lambda: True, "nothing")  # what is ready needs no check
    assert asked == [1]


def test_the_trainer_sees_that_its_run_is_no_longer_in_the_sink(tmp_path: Path) -> None:
    published = PublicationReader(LocalSink(tmp_path / "sink"), "demo")
    with pytest.raises(
        RetryError, match=r"the sink is gone: run 'demo', .* has no head in local sink .*sink: it was deleted"
    ):
        still_there(published)
    claim(published.sink, "demo")
    still_there(published)
    shutil.rmtree(tmp_path / "sink")
    with pytest.raises(RetryError, match="the sink is gone"):
        still_there(published)


def test_a_sink_that_does_not_answer_is_not_gone(tmp_path: Path) -> None:
    class Silent(LocalSink):
        def read_head(self, run: str, *, timeout_s: float = 60.0) -> bytes | None:
            raise RetryError("no answer")

    still_there(PublicationReader(Silent(tmp_path / "sink"), "demo"))


def test_master_weights_keep_what_rounding_would_lose() -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.0, 3.14159]))
    optimizer = MasterWeights(torch.optim.SGD([parameter], lr=1.0), [parameter])
    assert parameter.tolist() == [1.0, 3.140625]
    optimizer.set_lr(1e-3)
    for _ in range(8):  # each step is below half a unit in the last place; together they are not
        parameter.grad = torch.tensor([-1.0, 0.0])
        optimizer.step()
    assert parameter.tolist() == [1.0078125, 3.140625]
    optimizer.zero_grad()
    assert parameter.grad is None


def test_bf16_pieces_are_views_of_the_fp32_parameters() -> None:
    live = torch.randn(6, 8).bfloat16().float()
    exporter = Bf16Exporter(TensorExporter({"w": live}))
    assert [(s.name, s.dtype, s.shape) for s in exporter.specs()] == [("w", "BF16", (6, 8))]
    (piece,) = exporter.pieces()
    live.mul_(2)
    np.testing.assert_array_equal(words_of(piece.data), words_of(live.bfloat16()))
    assert piece.data.untyped_storage().data_ptr() == live.untyped_storage().data_ptr()
    with pytest.raises(PlanError, match=r"not FP32.*: b"):
        Bf16Exporter(TensorExporter({"a": live, "b": torch.zeros(2, dtype=torch.int64)})).specs()


def test_the_proofs_digest_sees_bytes_names_shapes_and_dtypes() -> None:
    a = {"x": torch.zeros(2, 3), "y": torch.ones(1)}
    others = [
        {"x": torch.zeros(2, 3), "z": torch.ones(1)},
        {"x": torch.zeros(3, 2), "y": torch.ones(1)},
        {"x": torch.zeros(2, 3), "y": torch.ones(1, dtype=torch.int32)},
        {"x": -torch.zeros(2, 3), "y": torch.ones(1)},
    ]
    assert sha256_of(a) == sha256_of(dict(reversed(a.items())))
    assert len({sha256_of(t) for t in (a, *others)}) == 5


def records(s: Settings, *, rise: float = 0.4) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What trainer and rollout write in a run of three steps, publishing each."""
    trainer: list[dict[str, Any]] = []
    rollout: list[dict[str, Any]] = []
    for run in (f"{s.run}-control", s.run):
        for v, phase in enumerate(("start", "learn", "learn", "fine")):
            mine = {"run": run, "version": v}
            trainer.append(
                mine | {"kind": "gathered", "sha256": f"{v}", "full_nbytes": 1000, "phase": phase, "step": v}
            )
            trainer.append(mine | {"kind": "outcome", "durable": True, "payload_nbytes": 100 * v})
            if v == 0 or run == s.run:
                applied = mine | {"kind": "applied", "sha256": f"{v}", "density": v / 10, "pause_s": v / 100}
                rollout.append(applied)
        for step in (1, 2, 3):
            version = max(0, step - 2) if run == s.run else 0
            trainer.append({"kind": "step", "run": run, "step": step, "sample_version": version})
            reward = 0.2 + (rise * (step - 1) if run == s.run else 0)
            rollout.append({"kind": "made", "run": run, "version": version, "sha256": f"{version}", "reward": reward})
    return trainer, rollout


def test_the_report_has_what_a_version_took() -> None:
    s = compose(["demo.learn_steps=2", "demo.fine_steps=1", "demo.control_steps=3"])
    report = demo_report.make_report(s, *records(s))
    assert (report["versions"], report["bit_exact"]) == (4, True)
    assert report["reward_control"] == pytest.approx(0.2)
    assert report["reward_last"] == pytest.approx(0.6)
    assert report["payload_nbytes"] == pytest.approx(200)
    assert report["full_nbytes"] == 1000
    assert report["density"] == pytest.approx(0.2)
    assert report["pause_s"] == pytest.approx(0.02)
    assert report["phases"]["learn"]["payload_nbytes"] == pytest.approx(150)
    assert report["phases"]["fine"]["density"] == pytest.approx(0.3)
    assert report["staleness"] == {"first": 0, "least": 1, "most": 1}
    assert [v["reward"] for v in report["per_version"]] == [pytest.approx(0.4), pytest.approx(1.0), None, None]
    assert demo_report.faults(report, 0.1) == []


@pytest.mark.parametrize(
    "break_it", ["other bytes", "other samples", "never applied", "never gathered", "control differs"]
)
def test_a_version_that_is_not_proved_fails_the_demo(break_it: str) -> None:
    s = compose(["demo.learn_steps=2", "demo.fine_steps=1", "demo.control_steps=3"])
    trainer, rollout = records(s)
    if break_it == "other bytes":
        next(r for r in rollout if r["run"] == s.run and r["version"] == 2)["sha256"] = "x"
    if break_it == "other samples":  # a batch that claims another version than the one that made it
        next(r for r in rollout if r["run"] == s.run and r["kind"] == "made")["version"] = 2
    if break_it == "never applied":
        rollout = [r for r in rollout if r["kind"] != "applied" or r["version"] != 2]
    if break_it == "never gathered":
        trainer = [r for r in trainer if r["kind"] != "gathered" or r["version"] != 2 or r["run"] != s.run]
    if break_it == "control differs":
        next(r for r in rollout if r["run"] != s.run)["sha256"] = "x"
    report = demo_report.make_report(s, trainer, rollout)
    assert not report["bit_exact"]
    (fault,) = demo_report.faults(report, 0.1)
    assert "not bit-exact" in fault
    if break_it != "control differs":
        assert "[2]" in fault


def test_main_writes_report_and_picture_and_fails_without_a_rise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["demo.learn_steps=2", "demo.fine_steps=1", "demo.control_steps=3", f"out={tmp_path}"]
    for rise, status in ((0.4, 0), (0.0, 1)):
        for name, rows in zip(("trainer", "rollout"), records(compose(overrides), rise=rise), strict=True):
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        assert demo_report.main(overrides) == status
    told = capsys.readouterr()
    assert "4 of 4 versions are bit-exact" in told.out
    assert "FAILED: the reward did not rise" in told.err
    assert json.loads((tmp_path / "report.json").read_text())["versions"] == 4
    assert (tmp_path / "picture.svg").read_text().count("<svg") == 1
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_is_the_same_every_time(tmp_path: Path) -> None:
    s = compose(["demo.learn_steps=2", "demo.fine_steps=1", "demo.control_steps=3"])
    report = demo_report.make_report(s, *records(s))
    for name in ("a", "b"):
        draw(report, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_progress_prints_starts_of_phases_every_so_many_steps_and_differing_bytes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress = Progress(10)
    progress.show({"kind": "gathered", "run": "r", "version": 0, "sha256": "a", "full_nbytes": 152_000})
    common = {"kind": "step", "run": "r", "phase": "learn", "lr": 5e-4, "steps": 20, "sample_version": 0}
    made = {"sample_reward": 0.25, "sample_density": 0.012, "sample_payload_nbytes": 1900, "sample_pause_s": 0.0004}
    for step in range(1, 16):
        progress.show(common | made | {"step": step, "sample_sha256": "b" if step == 12 else "a"})
    lines = capsys.readouterr().out.split("\n")
    assert [line.split()[1] for line in lines if line.startswith("  step")] == ["1/20", "10/20", "12/20"]
    assert ["BYTES DIFFER" in line for line in lines if line.startswith("  step")] == [False, False, True]
    assert "1.9 of 152.0 kB" in lines[2]
