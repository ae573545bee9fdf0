"""Packaging of tmlib; tool settings live in pyproject.toml."""

import pathlib
import re

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).parent

_version = re.search(
  r"^__version__ = '([^']+)'$",
  (ROOT / 'tmlib' / '_version.py').read_text(encoding='utf-8'),
  re.MULTILINE,
)
if _version is None:
  raise RuntimeError("tmlib/_version.py has no line __version__ = '...'")

# What the shipped experiments and notebooks import beyond the library.
EXAMPLES = [
  'mil>=1.0.5',
  'pillow>=11',
  'scikit-image>=0.25',
  'scikit-learn>=1.6',
]
# The compilers of TPUs and of GPUs, which need no device. They are built for
# Linux only; elsewhere their tests are skipped. Of CUDA, ptxas and libdevice
# are all that a compilation asks for.
AOT = [
  'jax[cuda13-local]>=0.10.2; platform_system == "Linux"',
  'libtpu; platform_system == "Linux"',
  'nvidia-cuda-nvcc>=13; platform_system == "Linux"',
]
H5 = ['h5py>=3.12']
TEST = [
  'cvxpy>=1.6',
  'grain>=0.2.18',
  'hypothesis>=6.100',
  'ipykernel>=6.29',
  'nbclient>=0.10',
  'nbformat>=5.10',
  'pyright>=1.1.390',
  'pytest>=8',
  'pytest-xdist>=3.6',
  'pyyaml>=6',
  'ruff>=0.9',
  'setuptools>=77',
  'tensorboard>=2.18',
]

setup(
  name='tmlib',
  version=_version.group(1),
  description=(
    'Reaction-diffusion, multiple-instance and decision-making methods as '
    'pure JAX functions in one training loop'
  ),
  long_description=(ROOT / 'README.md').read_text(encoding='utf-8'),
  long_description_content_type='text/markdown',
  author='The tmlib authors',
  license='Apache-2.0',
  license_files=['LICENSE'],
  keywords=['jax', 'machine learning', 'multiple instance learning'],
  classifiers=[
    'Development Status :: 3 - Alpha',
    'Intended Audience :: Science/Research',
    'Operating System :: POSIX :: Linux',
    'Programming Language :: Python :: 3',
    'Programming Language :: Python :: 3.11',
    'Programming Language :: Python :: 3.12',
    'Topic :: Scientific/Engineering :: Artificial Intelligence',
    'Typing :: Typed',
  ],
  packages=find_packages(
    include=['tmlib', 'tmlib.*', 'kernels_pallas', 'kernels_pallas.*']
  ),
  package_data={
    'tmlib': ['py.typed'],
    'kernels_pallas': ['py.typed'],
    'kernels_pallas.tuning': ['blocks.json'],
  },
  python_requires='>=3.11',
  # Floors only: Python 3.11 resolves to jax 0.10, later ones to the newest.
  install_requires=[
    'absl-py>=2.3',
    'chex>=0.1.92',
    'flax>=0.12.8',
    'jax>=0.10.2',
    'matplotlib>=3.10',
    'ml_collections>=1.1',
    'numpy>=2.0',
    'optax>=0.2.8',
    'orbax-checkpoint>=0.12.8',
    'scipy>=1.14',
    'tensorboardX>=2.6.5',
  ],
  extras_require={
    'aot': AOT,
    'cuda13': ['jax[cuda13]>=0.10.2'],
    'examples': EXAMPLES + H5,
    'h5': H5,
    'test': TEST + EXAMPLES + AOT + H5,
    'tpu': ['jax[tpu]>=0.10.2'],
  },
  zip_safe=False,
)
