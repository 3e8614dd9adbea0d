"""Quantised canonical bytes, bit for bit: formulas by name and version, checkpoint names, the exchange of amaxes.

``formulas`` names them, ``nvfp4`` and ``fp8`` compute them, ``checkpoint`` says which tensors a weight becomes, ``jobs``,
``passes`` and ``exchange`` run them over what a rank owns (driven by ``trainer.quantised``). ``derived`` has the value
transforms that engines make of quantised weights, for a receiver's derivations.
"""
