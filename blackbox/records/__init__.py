"""What callers ask for and what blackbox writes: values in, values out."""
