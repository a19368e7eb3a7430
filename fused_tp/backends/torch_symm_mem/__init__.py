"""torch's own ops over symmetric memory."""
