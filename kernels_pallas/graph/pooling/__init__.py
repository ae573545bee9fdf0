"""Attention pooling of ragged segments, such as bags packed into rows."""

from kernels_pallas.graph.pooling.api import segment_pool
from kernels_pallas.graph.pooling.gate import Gate

__all__ = ['Gate', 'segment_pool']
