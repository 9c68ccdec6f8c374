"""The version of selfspec."""

__version__ = "0.2.0"
