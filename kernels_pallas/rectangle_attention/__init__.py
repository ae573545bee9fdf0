"""Attention of recommenders: HSTU's, and LIME's between links and history."""

from kernels_pallas.rectangle_attention.hstu import hstu_attention

__all__ = ['hstu_attention']
