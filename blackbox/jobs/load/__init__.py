"""Load requests from files into a request topic."""
