"""Which Stretto this is."""

from importlib.metadata import version

VERSION = version("stretto-swarm")
"""As ``pip`` knows it."""
