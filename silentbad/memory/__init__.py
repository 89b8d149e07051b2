"""The lower level of memory reinforcement: probes of phrases, masks, rehearsal, shares, timesteps,
loss weights.

`memory_reinforce.py` collects the registries (those of regions and rehearsal are defined
here) and has `Memory`, the hook that each step calls."""
