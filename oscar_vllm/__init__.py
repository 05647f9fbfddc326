"""OSCAR: a 2-bit KV cache for stock vLLM, installed as a plugin."""

__version__ = "0.1.0"
