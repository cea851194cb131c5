"""Runs you can see: the run directory, phases, metrics, GPUs, and the commands that read them.

`run` writes; `status`, `watch`, `stop`, `ps` and `report` read, from any other process. Imports neither torch nor any
model code; importing this package imports none of its modules, so that `status` starts at once.
"""
