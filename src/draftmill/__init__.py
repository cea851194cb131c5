"""Draftmill: a trainer of DFlash drafters for speculative decoding.

Importing the package imports no room: `draftmill.config` and `draftmill.monitor` work without torch.
"""

__version__ = "0.1.0"
