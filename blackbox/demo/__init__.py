"""The demo: real servers, a real service, three callers, and a verdict by an independent consumer."""
