"""Layout remap: where canonical words lie in an engine's live tensors.

`arrange` composes a layout by hand, `named` and `experts` hold the known engines', `probe` discovers one. This package
must import nothing of megasync but ``errors``, ``digest``, ``types`` and ``kernels``.
"""

from megasync.layout.chain import chained, inverse, normalised
from megasync.layout.compose import Arrangement, arrange, with_copies
from megasync.layout.encoding import decode_layouts, encode_layouts, layouts_digest
from megasync.layout.modes import Digit, Layout, Remap
from megasync.layout.plan import ProbedPlan
from megasync.layout.probe import probe
from megasync.layout.prove import validate, validate_all

__all__ = [
    "Arrangement",
    "Digit",
    "Layout",
    "ProbedPlan",
    "Remap",
    "arrange",
    "chained",
    "decode_layouts",
    "encode_layouts",
    "inverse",
    "layouts_digest",
    "normalised",
    "probe",
    "validate",
    "validate_all",
    "with_copies",
]
