"""The drafter: its shape, network, mask and loss. Imports no room but `target` and below."""

from draftmill.drafter.cache import DrafterCache
from draftmill.drafter.head import TargetHead
from draftmill.drafter.network import Drafter
from draftmill.drafter.shape import DrafterShape, shape_for

__all__ = ["Drafter", "DrafterCache", "DrafterShape", "TargetHead", "shape_for"]
