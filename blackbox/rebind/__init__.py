"""`blackbox rebind`, for an index that belongs to another topic, cluster or group than the current one.

A shard whose index does not fit stays closed, as only a person knows which of the two is right.
"""

from blackbox.rebind.decision import FITS, INTERRUPTED, NO_INDEX
from blackbox.rebind.topic_rebind import Pending, rebind

__all__ = ["FITS", "INTERRUPTED", "NO_INDEX", "Pending", "rebind"]
