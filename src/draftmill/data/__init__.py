"""Chats to tokens, masks, a store, and batches of it. `draftmill.data.loader` alone imports torch."""

from draftmill.data.anchors import Anchors, draw_anchors
from draftmill.data.plan import BatchPlan, split_heldout
from draftmill.data.store import Store

__all__ = ["Anchors", "BatchPlan", "Store", "draw_anchors", "split_heldout"]
