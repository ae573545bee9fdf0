"""Softmax attention: masked, grouped, rotated, at any length."""

from kernels_pallas.softmax_attention.api import attention
from kernels_pallas.softmax_attention.options import Blocks, Rope, Spans

__all__ = ['Blocks', 'Rope', 'Spans', 'attention']
