"""The Kafka side of a shard: requests and their outcomes."""
