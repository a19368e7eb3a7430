"""Schedules: the order of data movement and computation in an op. They do not use autograd."""
