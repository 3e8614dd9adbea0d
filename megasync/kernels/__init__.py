"""GPU kernels, each with a plain-torch reference that is its specification.

``compact`` finds the changed words of live weights against the snapshot; ``scatter`` (from pinned memory:
``scatter_stream``) XORs changed words into live weights through the layout; ``walk`` digests whole live weights and XORs
decoded masks; ``records`` packs the layout for all of them, ``planes`` and ``weights`` hold the rules of the wire form and
of the state digest. ``nvfp4`` quantises, ``zero_run`` encodes blocks. Modules named ``_*_triton`` import Triton and are
loaded only for tensors on a GPU, so a CPU machine needs no Triton. This floor must import nothing of megasync but
``types`` and ``errors``.
"""
