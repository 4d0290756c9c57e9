"""Logs, and how Python itself is set up."""
