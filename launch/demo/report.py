"""What the demo proved: report.json and a picture from the records of both processes; fails where a promise was broken.

    python launch/demo/report.py [the overrides of the run]

Run by launch/demo.sh when trainer and rollout have ended. Exit status 1: bytes differed, or the reward did not rise; 2: there are no
records of such a run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from launch.compose import compose
from launch.settings import Settings, episodes

Row = dict[str, Any]

_MEASURED = ("payload_nbytes", "full_nbytes", "pause_s", "density")
_WINDOW = 10


def make_report(s: Settings, trainer: list[Row], rollout: list[Row]) -> dict[str, Any]:
    """Put the records of both sides together.

    Args:
        s: Settings of the run.
        trainer: Rows of trainer.jsonl.
        rollout: Rows of rollout.jsonl.

    Returns:
        ``versions`` applied (the first one included); ``bit_exact``, whether both sides had the same bytes at each of
        them and none is missing; mean rewards of the first and last batches, and of the control; means over the deltas
        of what a version took, also by phase and in a list by version; the control's rewards; ``staleness``, steps between the weights that
        made a batch and those that learned from it (0 for the first batch, which nothing came before).
    """
    runs = {e.run: e for e in episodes(s)}
    exact = {run: _exactness(run, trainer, rollout, every=e.apply) for run, e in runs.items()}
    versions = _per_version(s.run, trainer, rollout, exact[s.run])
    deltas = [v for v in versions if v["phase"] != "start"]
    rewards = {run: [r["reward"] for r in rollout if r["kind"] == "made" and r["run"] == run] for run in runs}
    mine, control = rewards[s.run], rewards.get(f"{s.run}-control") or rewards[s.run][:_WINDOW]
    stale = _staleness(s.run, trainer)
    return {
        "versions": len(versions),
        "bit_exact": all(all(of_run.values()) for of_run in exact.values()),
        "reward_first": _mean(mine[:_WINDOW]),
        "reward_last": _mean(mine[-_WINDOW:]),
        "reward_control": _mean(control[-2 * _WINDOW :]),
        **_means(deltas),
        "phases": {p.name: _means(v for v in deltas if v["phase"] == p.name) for p in runs[s.run].phases if p.steps},
        "staleness": {"first": stale[0], "least": min(stale[1:], default=0), "most": max(stale)},
        "per_version": versions,
        "control_rewards": control,
    }


def faults(report: dict[str, Any], min_rise: float) -> list[str]:
    """Promises that the run broke; empty when all is well."""
    found = []
    if not report["bit_exact"]:
        wrong = [v["version"] for v in report["per_version"] if not v["bit_exact"]]
        found.append(f"not bit-exact: live weights differ from the trainer's, or are missing, at versions {wrong}")
    if report["reward_last"] < report["reward_control"] + min_rise:
        found.append(
            f"the reward did not rise: {report['reward_last']:.3f} at the end, {report['reward_control']:.3f} where "
            f"weights were never applied, expected {min_rise} more"
        )
    return found


def _exactness(run: str, trainer: list[Row], rollout: list[Row], *, every: bool) -> dict[int, bool]:
    """Whether the digests of both sides agree, by version; with ``every``, versions of one side alone do not.

    The rollout tells a digest when it applied a version, and one with every batch that a version made.
    """
    gathered = {r["version"]: r["sha256"] for r in trainer if r["kind"] == "gathered" and r["run"] == run}
    live: dict[int, set[str]] = {}
    for r in rollout:
        if r["run"] == run:
            live.setdefault(r["version"], set()).add(r["sha256"])
    expected = gathered.keys() | live.keys() if every else live.keys() | {min(gathered)}
    return {v: v in gathered and live.get(v) == {gathered[v]} for v in sorted(expected)}


def _per_version(run: str, trainer: list[Row], rollout: list[Row], exact: dict[int, bool]) -> list[Row]:
    of_run = [r for r in (*trainer, *rollout) if r["run"] == run]
    by_kind = {k: {r["version"]: r for r in of_run if r["kind"] == k} for k in ("gathered", "outcome", "applied")}
    rewards: dict[int, list[float]] = {}
    for r in of_run:
        if r["kind"] == "made":
            rewards.setdefault(r["version"], []).append(r["reward"])
    versions = []
    for v, same in exact.items():
        gathered, applied = by_kind["gathered"].get(v, {}), by_kind["applied"].get(v, {})
        versions.append(
            {
                "version": v,
                "phase": gathered.get("phase", "unknown"),
                "step": gathered.get("step", -1),
                "reward": fmean(rewards[v]) if v in rewards else None,
                "bit_exact": same,
                "payload_nbytes": by_kind["outcome"].get(v, {}).get("payload_nbytes", 0),
                "full_nbytes": gathered.get("full_nbytes", 0),
                "pause_s": applied.get("pause_s", 0.0),
                "density": applied.get("density", 0.0),
            }
        )
    return versions


def _staleness(run: str, trainer: list[Row]) -> list[int]:
    """By batch: steps done before it was learned from, minus steps that its weights had seen."""
    step_of = {r["version"]: r["step"] for r in trainer if r["kind"] == "gathered" and r["run"] == run}
    steps = [r for r in trainer if r["kind"] == "step" and r["run"] == run]
    return [r["step"] - 1 - step_of[r["sample_version"]] for r in steps]


def _means(versions: Iterable[Row]) -> dict[str, float]:
    rows = list(versions)
    return {name: _mean([v[name] for v in rows]) for name in _MEASURED}


def _mean(values: list[float]) -> float:
    return fmean(values) if values else 0.0


def read_rows(path: Path) -> list[Row]:
    """Rows of a records file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def main(overrides: list[str]) -> int:
    """Write the report and the picture, print a summary.

    Returns:
        Exit status.
    """
    try:
        s = compose(overrides)
        out = Path(s.out)
        trainer, rollout = read_rows(out / "trainer.jsonl"), read_rows(out / "rollout.jsonl")
    except (ValueError, OSError) as e:
        print(f"report: {e}: give the overrides of a demo that ended (launch/demo.sh runs one)", file=sys.stderr)
        return 2
    report = make_report(s, trainer, rollout)
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")

    from launch.demo.picture import draw

    draw(report, out / "picture")
    exact = sum(v["bit_exact"] for v in report["per_version"])
    print(f"\n{exact} of {report['versions']} versions are bit-exact: live engine weights = full gather in the trainer")
    print(f"reward {report['reward_first']:.3f} -> {report['reward_last']:.3f}, control {report['reward_control']:.3f}")
    for name, phase in report["phases"].items():
        print(
            f"{name:>6}: {phase['density']:.2%} changed, {phase['payload_nbytes'] / 1e3:.1f} of "
            f"{phase['full_nbytes'] / 1e3:.1f} kB sent, pause {phase['pause_s'] * 1e3:.1f} ms (means a version)"
        )
    print(f"report: {out}/report.json   picture: {out}/picture.svg")
    broken = faults(report, s.demo.min_rise)
    for fault in broken:
        print(f"FAILED: {fault}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
