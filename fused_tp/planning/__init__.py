"""Parallel configurations of a model: description, checks, building, and prediction of time and memory."""
