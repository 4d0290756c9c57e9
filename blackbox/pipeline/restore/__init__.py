"""A lost Redis filled again from the journals."""
