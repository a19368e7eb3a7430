"""Selftest of a machine with GPUs: `fused-tp selftest`."""
