"""Support for transformers models: sequence sharding, attention, state layers and KV caches."""
