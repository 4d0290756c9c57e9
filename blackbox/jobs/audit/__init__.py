"""The audit: what became of every request, and what is wrong with it."""
