"""What came out of the parts in silentbad/experiments/, as --help shows it."""

# "slot.name" -> (arm of bench/results/recovery.md or "", what came out). An arm's figure is its
# speed in steps over plain's on twelve targets; tests/experiments/test_outcomes.py compares each
# with the stored rows.
OUTCOMES: dict[str, tuple[str, str]] = {
    "gradient_control.gsnr": ("gsnr", "1.00 [1.00, 1.00] of plain's speed, less rise of the clean error"),
    "gradient_control.prior": ("prior", "1.00 [1.00, 1.33] of plain's speed"),
    "gradient_control.inverse_rms": ("inverse_rms", "0.88 [0.63, 1.00] of plain's speed"),
    "gradient_control.auto_rgn": ("auto_rgn", "1.00 [1.00, 1.33] of plain's speed, more rise of the clean error"),
    "gradient_control.hypergradient": (
        "hypergradient",
        "1.00 [0.75, 1.50] of plain's speed, slower in seconds",
    ),
    "gradient_control.between.contrast": ("", "the elements' signal-to-noise ratio is zero"),
    "gradient_control.between.equalise": ("", "no reported arm"),
    "gradient_control.transform.remove_conflict": ("", "no reported arm"),
    "memory.sampler.leitner": ("", "no reported arm"),
    "memory.timesteps.curriculum": (
        "curriculum",
        "1.29 [1.00, 2.08] of plain's speed, fewer images at the end",
    ),
    "memory.timesteps.learning_progress": (
        "learning_progress",
        "1.00 [1.00, 1.00] of plain's speed",
    ),
    "memory.attention_binding.mass": ("attention_binding", "1.00 [1.00, 1.00] of plain's speed"),
    "memory.distillation.and": ("and_distillation", "0.63 [0.16, 1.00] of plain's speed"),
    "memory.retention.l2_sp": ("retention", "0.83 [0.27, 1.00] of plain's speed, less rise of the clean error"),
    "memory.loss_balance.gradient_norm": ("", "no reported arm"),
    "memory.loss.soft_min_snr": ("", "no reported arm"),
    "memory.loss.debiased": ("", "no reported arm"),
    "memory.loss.p2": ("", "no reported arm"),
    "memory.loss.sigma_sqrt": ("", "no reported arm"),
    "memory.loss.cosmap": ("", "no reported arm"),
    "memory.loss.x0": ("", "no reported arm"),
    "memory.loss.huber": ("", "no reported arm"),
}


def outcomes() -> str:
    """One line for each entry, as `--help` shows them."""
    return "\n".join(f"  {name}: {outcome}" for name, (_, outcome) in OUTCOMES.items())
