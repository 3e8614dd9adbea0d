"""Where publications are written and read: the contract, and the sinks that come with megasync.

``open_sink`` opens one by its URL. Each sink's own module is imported only when it is used.
"""

from megasync.sinks.base import Sink
from megasync.sinks.registry import open_sink

__all__ = ["Sink", "open_sink"]
