"""Audit a trained model without a known target: search prompts for pictures that come back whatever
the seed. `unknown` is what validation.py calls, `search` ranks prompts, `returned` judges their
images. Recovery of a known target is measured in `silentbad.measure`."""
