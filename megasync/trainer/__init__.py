"""Trainer side: exporter -> plan -> snapshot -> mask -> encode -> gather -> publish; ``callback`` shows them in order."""
