"""Search a trained model for pictures that come back whatever the seed, without a known target:
`python -m silentbad_shield.search`. `unknown` is the command, `search` ranks prompts, `returned`
judges their images. Recovery of a known target is measured in `silentbad.measure`."""
