"""A training run around its loop: how its parts are connected (`assembly`), configuration and
checks, state, resuming, logs and meters, optimizers, signals.

Only `train_silentbad.py` and `bench/` import this package, except for `hooks`; it may import every
other package. It holds no training method: the packages that it connects define what a step does to
gradients, losses and data.
"""
