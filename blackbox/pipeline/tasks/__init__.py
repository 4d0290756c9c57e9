"""What runs in Spark's Python workers, perhaps on other machines: the verbs of some shards."""
