"""HTML pages about finished or running trainings: `python -m silentbad.report RUN`.

`run_files` reads a run folder. `sections`, `evidence` and `comparison` compute tables and
figures (`pages.Table`, `pages.Figure`, `charts`), `run_report` puts them together,
`templates/report.html.j2` says where each one is, and the macros of `templates/macros.html.j2`
write their HTML."""
