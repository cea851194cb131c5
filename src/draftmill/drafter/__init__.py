"""The drafter: its shape, network, mask and loss. Imports no room but `target` and below."""

from draftmill.drafter.cache import DrafterCache
from draftmill.drafter.network import Drafter
from draftmill.drafter.shape import DrafterShape, shape_for
from draftmill.target.head import TargetHead

__all__ = ["Drafter", "DrafterCache", "DrafterShape", "TargetHead", "shape_for"]
