"""Models of transformers: families, attention, caches."""
