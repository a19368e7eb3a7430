"""Base layer: groups, settings, errors, partitions, tracing, dispatch. Imports no other layer."""
