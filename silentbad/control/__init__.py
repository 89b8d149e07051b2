"""Gradient control below its rules: statistics of gradients by group, sources, rates,
resumable state.

The rules and the controller are in `gradient_control.py`. Nothing here knows records or
captions."""
