"""A run on disk: its folder and facts (`folder`), checkpoints that are whole or absent
(`checkpoint`), the facts that a checkpoint and the run that resumes it must share (`identity`), the
model card and its upload (`card`)."""
