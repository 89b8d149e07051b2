"""A run on disk: its folder and facts (`folder`), checkpoints that are whole or absent
(`checkpoint`), what a checkpoint and the run that resumes it must have in common (`identity`), the
model card and its upload (`card`)."""
