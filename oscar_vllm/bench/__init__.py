"""Measurements on one GPU: kernels side by side with what vLLM serves today."""
