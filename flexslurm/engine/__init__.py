"""The inference engine: scheduling, paged KV, stages, workers; the only package that imports torch."""
