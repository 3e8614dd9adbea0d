"""The ``megasync`` command. Everything here works offline, on machines without a trainer, an engine or torch."""
