"""Parts that were measured and did not earn their place: files that a user could have written,
chosen by place, `experiments/gsnr.py:gsnr`. README.md says what came of each."""
