"""The audit: the status of every request, and all exceptions."""
