"""The target: loaded, cut after its last tap, read for features. Imports no room but `data` and below.

Import from the modules: this file stays empty of torch, so that a light command need not load it.
"""
