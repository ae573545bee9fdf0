"""tmlib: new machine-learning methods as pure functions in one training loop.

Import the family you need, for example `from tmlib import reaction_diffusion`;
this module itself imports nothing heavy and sets no global flag.
"""

from tmlib._version import __version__

__all__ = ['__version__']
