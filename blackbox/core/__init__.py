"""The verbs of a shard (intake, dispatch and recovery) and what they need of an index and of journals."""
