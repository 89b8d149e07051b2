"""The lower level of gradient control: statistics of gradients by group, sources, rates, resumable
state.

The rules and the controller are in `gradient_control.py`. Nothing here knows records or
captions."""
