"""Progress of the demo, printed by the trainer's rank 0 while it runs: one line every few steps."""

from __future__ import annotations

from typing import Any

_TITLES = {
    "control": "control: versions are published, but the engine never applies them",
    "learn": "learn: the engine applies every version",
    "fine": "fine: a learning rate that is usual for large models, where few elements change",
}


class Progress:
    """Prints what the trainer's records say.

    Args:
        every: Steps between lines.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._phase = ""
        self._gathered: dict[tuple[str, int], tuple[str, int]] = {}

    def show(self, row: dict[str, Any]) -> None:
        """Look at a record; print at the start of a phase, every so many steps, and whenever bytes differ."""
        if row["kind"] == "gathered":
            self._gathered[row["run"], row["version"]] = row["sha256"], row["full_nbytes"]
        if row["kind"] != "step":
            return
        if fresh := row["phase"] != self._phase:
            self._phase = row["phase"]
            print(f"\n{_TITLES.get(self._phase, self._phase)} (learning rate {row['lr']:g})", flush=True)
        sha256, full_nbytes = self._gathered[row["run"], row["sample_version"]]
        exact = sha256 == row["sample_sha256"]
        if not (fresh or row["step"] % self._every == 0 or row["step"] == row["steps"]) and exact:
            return
        payload = f"{row['sample_payload_nbytes'] / 1e3:.1f} of {full_nbytes / 1e3:.1f} kB"
        print(
            f"  step {row['step']:>4}/{row['steps']}  reward {row['sample_reward']:.3f} by version "
            f"{row['sample_version']:>3}  changed {row['sample_density']:>7.2%}  sent {payload:>17}  "
            f"pause {row['sample_pause_s'] * 1e3:5.1f} ms  {'bit-exact' if exact else 'BYTES DIFFER'}",
            flush=True,
        )
