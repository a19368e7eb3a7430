"""Backends: one folder per transport, with its schedules. The registry selects a schedule for each call."""
