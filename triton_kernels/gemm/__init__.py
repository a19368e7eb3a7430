"""Matmuls, alone and with a collective in the same launch."""
