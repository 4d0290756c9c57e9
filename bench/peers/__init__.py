"""Delayed work in other systems beside blackbox: the same messages, phases and faults for each contestant."""
