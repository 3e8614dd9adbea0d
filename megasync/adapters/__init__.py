"""Adapters: the code that knows one trainer or one engine. Each imports its framework only when it is used."""
