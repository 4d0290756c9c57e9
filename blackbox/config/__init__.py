"""Settings, and what is made of them."""
