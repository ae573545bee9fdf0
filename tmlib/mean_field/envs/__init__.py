"""Environments of mean-field games."""

from tmlib.mean_field.envs.crowd import (
  beach_bar,
  beach_bar_2d,
  crowd_1d,
  crowd_2d,
  four_rooms,
)

__all__ = ['beach_bar', 'beach_bar_2d', 'crowd_1d', 'crowd_2d', 'four_rooms']
