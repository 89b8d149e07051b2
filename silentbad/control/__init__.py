"""The lower level of gradient control: statistics of gradients by group, gradients by source,
multipliers and rates, spectral updates, decay to the base, rates as a share of the weights.

The rules and the controller are in `gradient_control.py`. Nothing here knows records or
captions."""
