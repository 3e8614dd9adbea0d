"""Progress of the demo, printed by the trainer's rank 0 while it runs: one line every few steps."""

from __future__ import annotations

from typing import Any

from launch.settings import Settings


class Progress:
    """Prints what the records say.

    Args:
        s: Settings.
    """

    def __init__(self, s: Settings) -> None:
        self._every = s.demo.show_every
        self._phase = ""
        self._full_nbytes = 0

    def show(self, row: dict[str, Any]) -> None:
        """Look at a record; print every so many steps and at the start of a phase."""
        if row["kind"] == "gathered":
            self._full_nbytes = row["full_nbytes"]
        if row["kind"] != "step":
            return
        if row["phase"] != self._phase:
            self._phase = row["phase"]
            print(f"\n{_TITLES.get(self._phase, self._phase)} (learning rate {row['lr']:g})", flush=True)
        elif row["step"] % self._every and row["step"] != row["steps"]:
            return
        print(
            f"  step {row['step']:>4}/{row['steps']}   reward {row['sample_reward']:.3f} by version "
            f"{row['sample_version']:>3}   changed {row['sample_density']:6.2%}   pause {row['sample_pause_s'] * 1e3:5.1f} ms",
            flush=True,
        )


_TITLES = {
    "control": "control: versions are published, the engine never applies them",
    "learn": "learn: the engine applies every version",
    "fine": "fine: a learning rate that is usual for large models, where few elements change",
}
