"""Backends: one folder per way to move bytes, with its transport and its schedules; the registry chooses among them."""
