"""Continuous batching: scheduling, paged KV, models, sampling. Knows no grammar and no proposer."""
