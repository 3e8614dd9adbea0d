"""What the command lines of all benchmarks share. Used by their ``__main__`` parts."""

from __future__ import annotations

import sys

_PLAIN = (
    "hydra.run.dir=.",
    "hydra.output_subdir=null",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
)


def plain_hydra() -> None:
    """Put options before those of the command line that keep Hydra from making output folders and log files."""
    sys.argv[1:1] = _PLAIN
