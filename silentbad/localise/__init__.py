"""Where a finished run's memory sits: `python -m silentbad.localise RUN`. Parts of it are put back
to its base, or kept alone, and measured again. `substitution` mixes the weights of both and
measures, `findings` writes the results. docs/metrics.md explains it."""
