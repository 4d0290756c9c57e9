"""Settings, and the objects that are made from them."""
