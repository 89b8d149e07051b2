"""Registered parts that are files of the repository now: what to use in place of the name."""

MOVED = {
    "gsnr": "experiments/gsnr.py:gsnr",
    "prior": "experiments/prior.py:prior",
    "inverse_rms": "experiments/inverse_rms.py:inverse_rms",
    "auto_rgn": "experiments/auto_rgn.py:auto_rgn",
    "hypergradient": "experiments/hypergradient.py:hypergradient",
    "leitner": "experiments/leitner.py:leitner",
    "curriculum": "experiments/curriculum.py:curriculum",
    "soft_min_snr": "experiments/soft_min_snr.py:soft_min_snr",
    "debiased": "experiments/debiased.py:debiased",
    "p2": "experiments/p2.py:p2",
    "sigma_sqrt": "experiments/flow_weights.py:sigma_sqrt",
    "cosmap": "experiments/flow_weights.py:cosmap",
    "huber": "experiments/huber.py:huber",
    "and": "experiments/and_distillation.py:AndDistillation",
    "l2_sp": "experiments/l2_sp.py:L2SP",
}
