"""A training run around its loop: configuration, checks, folder, state, checkpoints (when and what:
`saving`; how a folder is written: `checkpoint`), meters, signals, optimizers, card.

Only `train_silentbad.py` and `bench/` import this package; it may look into every other one. No method is here: what
a step does to gradients, losses and data is in the packages that it connects."""
