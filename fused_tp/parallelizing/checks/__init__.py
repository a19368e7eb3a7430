"""Checks that a sharded model computes the same as the unsharded model."""
