"""The Spark engine: intake is a streaming query, dispatch is done by long-running tasks."""
