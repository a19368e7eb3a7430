"""`parallelize`: shards a model in place, and proves that it still computes the same."""
