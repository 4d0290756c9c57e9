"""The Spark engine: intake is a streaming query, dispatch are tasks that linger."""
