"""Seeded faults on real servers: whatever was acknowledged comes out exactly once, and never early."""
