"""Whether the run that the trainer publishes is still in the sink, which the rollout process waits for as well.

Called by launch/demo/learner.py while it waits for samples. Must not import Megatron.
"""

from __future__ import annotations

from megasync.errors import MegasyncError, RetryError
from megasync.versions.publication import PublicationReader


def still_there(published: PublicationReader) -> None:
    """Refuse to wait on for samples where the run that they follow is gone: no engine could load its weights.

    Args:
        published: Of a run that this trainer began.

    Raises:
        RetryError: The sink has no head of it.
    """
    try:
        head = published.head()
    except (MegasyncError, OSError):
        return  # it does not answer just now: what the publisher does about that is the publisher's business
    if head is None:
        raise RetryError(
            f"the sink is gone: run {published.run!r}, which this trainer publishes, has no head in "
            f"{published.sink.describe()}: it was deleted or unmounted. Start the demo anew, and leave the sink while it runs"
        )
