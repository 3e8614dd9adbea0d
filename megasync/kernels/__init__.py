"""GPU kernels, each with a plain-torch reference that is its specification.

``compact`` finds the changed words of live weights against the snapshot, ``scatter`` XORs changed words into live
weights through the layout, ``dense`` XORs decoded masks, ``audit`` digests live weights; ``records`` packs the layout
for all of them. Modules named ``_*_triton`` import Triton and are loaded only for tensors on a GPU, so a CPU machine
needs no Triton. This floor must import nothing of megasync but ``types`` and ``errors``.
"""
