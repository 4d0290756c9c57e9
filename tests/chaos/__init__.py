"""Seeded faults on real servers: every acknowledged request is delivered exactly once, and never early."""
