"""Measuring recovery: do composed prompts give a target picture back?

Here live the images that a validation generates and keeps (`generation`, `samples`), how alike two pictures are
(`embedders`), thresholds and the null sets behind them (`nulls`), the scores and their intervals (`scores`,
`statistics`), validation.json as typed data (`record`), and the report made from it (`report`, `charts`, `templates/`).
The hook that calls these during training is `validation.py` at the root; training, gradient control and memory
reinforcement live elsewhere, and nothing here imports them.
"""
