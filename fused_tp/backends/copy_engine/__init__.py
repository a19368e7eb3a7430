"""The GPU's copy engines over symmetric memory."""
