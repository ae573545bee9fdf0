"""Attention and sparse kernels: the ground floor, which imports jax only."""

__all__ = []
