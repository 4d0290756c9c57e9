"""The engines, which call the verbs: the process engine, the Spark engine, and what both share."""
