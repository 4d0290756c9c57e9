"""How a service answers over HTTP: its probes and its metrics."""
