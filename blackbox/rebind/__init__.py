"""What becomes of an index that belongs to another topic, cluster or group than what is there now.

A shard whose index does not fit stays closed, as nobody but a person knows which of the two is meant.
"""

from blackbox.rebind.decide import FITS, INTERRUPTED, NO_INDEX
from blackbox.rebind.run import Pending, rebind

__all__ = ["FITS", "INTERRUPTED", "NO_INDEX", "Pending", "rebind"]
