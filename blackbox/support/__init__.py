"""Logs, settings of the interpreter, and archives of Java classes."""
