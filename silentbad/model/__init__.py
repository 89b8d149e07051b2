"""The Stable Diffusion pipeline: its parts loaded and saved, captions and images encoded, the
module that trains.

`diffusion` holds the noisy latents and the prediction target, `denoiser` what trains, `store` the
cache of latents and text states on disk, `groups` which layer a parameter belongs to. No loss, no
optimizer, no measurement of recovery."""
