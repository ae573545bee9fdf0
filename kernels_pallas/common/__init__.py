"""What the kernel folders share: checks, padding, launching, sharding."""

__all__ = []
