"""Ahead-of-time compiler and runtime for the Kimi K3 family on Apache TVM."""

__version__ = "0.1.0"
