"""Tightrope: structured and speculative decoding of large language models, exact and pluggable."""

__version__ = "0.1.0"
