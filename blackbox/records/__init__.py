"""Requests, and the records that blackbox writes: values in, values out."""
