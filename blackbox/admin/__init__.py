"""What people ask of a running blackbox: find, list, cancel, count; for the command line and HTTP alike."""
