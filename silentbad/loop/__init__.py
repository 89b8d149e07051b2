"""A training run around its loop: how its parts are connected (`assembly`), configuration and
checks, state, resuming, logs and meters, optimizers, signals.

Only `train_silentbad.py` and `bench/` import this package, but for `hooks`; it may look into every
other one. No method is here: what a step does to gradients, losses and data is in the packages that
it connects.
"""
