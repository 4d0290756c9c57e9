"""What an operator allows callers, and the rate limits of targets; see `docs/callers.md` for the file."""
