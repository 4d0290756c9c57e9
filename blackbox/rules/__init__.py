"""What an operator allows callers, and how fast targets are fed: `docs/callers.md` has the file."""
