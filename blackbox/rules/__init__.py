"""The rules of an operator for callers, and the rate limits of targets; see `docs/callers.md` for the file."""
