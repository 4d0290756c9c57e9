"""The HTTP side of a service: probes, metrics, the API and the web page."""
