"""An even load for a long time, a fault every minute: what grows, what is late, what is lost."""
