"""Signals, workspaces and gathers of kernels that run on several ranks."""
