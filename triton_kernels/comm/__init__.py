"""Signals, workspaces and gathers: what kernels of several ranks share."""
