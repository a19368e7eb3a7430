"""Shard a model in place (`parallelize`) and check that its outputs are unchanged."""
