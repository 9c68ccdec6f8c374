"""The version of selfspec."""

__version__ = "0.3.0"
