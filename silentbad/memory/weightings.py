"""Loss weights by noise level, converted between prediction types. Legend: snr (B,)."""

import torch


def in_prediction(w_eps: torch.Tensor, snr: torch.Tensor, prediction_type: str) -> torch.Tensor:
    """The weight (B,) on the model's own error that equals w_eps on the epsilon error:
    ||d eps||^2 = SNR ||d x0||^2 = SNR/(SNR+1) ||d v||^2 (2202.00512), and of a flow, whose sigma is
    1/(1 + sqrt(SNR)), (1 - sigma)^2 ||d(eps - x0)||^2."""
    if prediction_type == "epsilon":
        return w_eps
    if prediction_type == "flow":
        return w_eps * (1 - flow_sigma(snr)).square()
    return w_eps * snr if prediction_type == "sample" else w_eps * snr / (snr + 1)


def flow_sigma(snr: torch.Tensor) -> torch.Tensor:
    """sigma (B,) of the rectified flow with this SNR = ((1 - sigma)/sigma)^2."""
    return 1 / (1 + snr.sqrt())


def mse(pred: torch.Tensor, target: torch.Tensor, delta: float) -> torch.Tensor:
    """The squared error, of the shape of both."""
    return (pred - target).square()
