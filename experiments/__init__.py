"""Runners: what turns a config into an `Experiment` for the loop."""

__all__ = []
