"""Parts that were measured and did not earn their place: reachable by name, off by default, out of
the way of a reader.

Rules, samplers, timestep policies, losses, auxiliaries and gradient transforms live here. The
registries of the root modules name each, "silentbad.experiments.losses:p2", and import it when it
is chosen; `silentbad/settings/outcomes.py` has its outcome. What is recommended, or what a
comparison needs as its baseline, does not live here: it stands in the root modules."""
