"""The Redis side of a shard: which requests are pending, in the order they are due."""
