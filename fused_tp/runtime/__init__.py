"""The base layer: groups, settings, errors, partitions, tracing, dispatch. Imports nothing above it."""
