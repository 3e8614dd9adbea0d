"""The receiving side: fetch -> stage -> apply, shown in order by ``applier``; the Engine port in ``engine``.

An inference host has no trainer: nothing here may import ``megasync.trainer`` or an adapter.
"""
