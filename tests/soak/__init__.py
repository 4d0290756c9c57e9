"""An even load for a long time, with a fault every minute: growth, lateness, losses."""
