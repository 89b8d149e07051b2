"""The Stable Diffusion pipeline: its parts loaded and saved, captions and images encoded, the
module that trains.

`diffusion` computes noisy latents and prediction targets, `denoiser` is the module that trains,
`store` caches latents and text states on disk, `groups` assigns parameters to layers. No loss, no
optimizer, no measurement of recovery."""
