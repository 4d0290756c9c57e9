"""The Kafka side of a shard: what was asked, and what became of it."""
