"""Requests from files into a request topic."""
