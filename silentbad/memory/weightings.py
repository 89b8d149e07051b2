"""Weights of the loss by noise level, carried between predictions. Legend: snr (B,)."""

import torch


def in_prediction(w_eps: torch.Tensor, snr: torch.Tensor, prediction_type: str) -> torch.Tensor:
    """The weight (B,) on the model's own error that equals w_eps on the epsilon error:
    ||d eps||^2 = SNR ||d x0||^2 = SNR/(SNR+1) ||d v||^2 (2202.00512)."""
    if prediction_type == "epsilon":
        return w_eps
    return w_eps * snr if prediction_type == "sample" else w_eps * snr / (snr + 1)


def mse(pred: torch.Tensor, target: torch.Tensor, delta: float) -> torch.Tensor:
    return (pred - target).square()
