"""SilentBad: compositional memory in Stable Diffusion, controlled and measured."""

__version__ = "0.1.0"
