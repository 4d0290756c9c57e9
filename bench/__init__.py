"""Benchmarks: blackbox compared with the same work without it, and with a simple loop written by hand."""
