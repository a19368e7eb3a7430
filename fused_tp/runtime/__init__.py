"""What everything else stands on: groups, settings, errors, partitions, tracing, dispatch. Imports nothing above it."""
