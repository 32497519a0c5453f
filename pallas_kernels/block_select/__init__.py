"""Which key blocks each query keeps, per KV head."""
