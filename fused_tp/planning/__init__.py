"""Parallel configurations: describe, check and build them, and predict their step time and memory."""
