"""How fast blackbox is, beside the same work without it and beside the loop people write by hand."""
