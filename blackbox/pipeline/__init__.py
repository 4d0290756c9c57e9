"""The Spark engine: the three verbs as a data pipeline."""
