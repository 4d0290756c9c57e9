"""The audit: the fate of every request, and all exceptions."""
