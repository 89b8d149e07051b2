"""Measuring recovery: do composed prompts give a target picture back?

`generation` and `samples` hold the images that a validation generates and keeps, `embedders` (and
`micro`, the bundled one) how alike two pictures are, `calibrate` the thresholds, from `redraws` or
`failures`, `scores` and `intervals` the scores and their intervals, `record` validation.json as
typed data. `measure` puts them together. The hook that calls it during training
is `validation.py` at the root."""
