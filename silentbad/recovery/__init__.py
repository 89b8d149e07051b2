"""Measuring recovery: do composed prompts give a target picture back?

Here live the images that a validation generates and keeps (`generation`, `samples`), how alike two pictures are
(`embedders`), thresholds and the null sets behind them (`thresholds`, `counterfactuals`), the scores and their
intervals (`scores`, `statistics`), and validation.json as typed data (`record`). An HTML page: `recorded` reads a run
folder, `sections`, `evidence` and `comparison` compute tables and figures (`pages.Table`, `pages.Figure`, `charts`),
`report` puts them together, `templates/report.html.j2` says where each one is, and the macros of
`templates/macros.html.j2` write their HTML.
The hook that calls these during training is `validation.py` at the root; training, gradient control and memory
reinforcement live elsewhere, and nothing here imports them.
"""
