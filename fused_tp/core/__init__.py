"""Base layer: groups, store, failures, settings, errors, tracing. Imports no other layer."""
