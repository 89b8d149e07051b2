"""The lower level of memory reinforcement: probes of phrases, masks, rehearsal, shares, timesteps,
loss weights.

`memory_reinforce.py` collects the registries (those of regions, rehearsal and sequences are defined
here) and has `Memory`, the object that each step calls."""
