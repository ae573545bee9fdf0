"""Attention of recommenders: HSTU's, and LIME's between links and history."""

from kernels_pallas.rectangle_attention.api import (
  hstu_attention,
  xor_attention,
)

__all__ = ['hstu_attention', 'xor_attention']
