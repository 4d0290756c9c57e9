"""Promotion of all shards at once."""
