"""The one place that states parti's version."""

__version__ = "0.1.0"
