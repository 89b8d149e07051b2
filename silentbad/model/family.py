"""The differences between families of latent diffusion models: parts, noise path, calls.

A `Family` states them once, for loading, training, validation, adapters and audits. A new family is
a subclass in a file of its own, an entry in `silentbad.model.registry`, and patterns for its layers
in `silentbad.model.groups`. Legend: noisy_latents (B,C,h,w), timesteps (B,), encoder_hidden_states
(B,L,D) text states, pooled (B,P) one text state a caption."""

from typing import Any

import torch
from diffusers import DDPMScheduler
from torch import Tensor, nn

from silentbad.errors import UserError
from silentbad.model import gate


class Family:
    """The parts of a pipeline, and what is done with them. The defaults are a UNet's."""

    name: str  # in messages
    pipeline: Any  # diffusers' class
    backbone: str  # the component that predicts
    kind: type  # its class
    # classes of the text encoders by component, in the order in which they encode
    encoders: dict[str, Any]
    tokenizer: dict[str, Any]  # classes of their tokenizers by component
    optional: tuple[str, ...] = ()  # components that a pipeline may lack
    sized: bool = False  # whether the backbone takes each picture's size and crop
    # whether the autoencoder overflows in fp16, where its own settings say so
    upcasts: bool = False
    flow: bool = False  # whether the path is a rectified flow
    # how pictures attend to text, for messages; maps are read of cross-attention only
    attention: str = "cross-attention"
    # prefix of each component in kohya's files of adapters; none: there is no such file
    kohya: dict[str, str] = {}

    @property
    def parts(self) -> list[str]:
        """The components that a pipeline must have."""
        named = [self.backbone, "vae", *self.encoders, *self.tokenizer, "scheduler"]
        return [name for name in named if name not in self.optional]

    # ---- the path
    def check_schedule(self, settings: dict[str, Any], where: str) -> None:
        """Refuse settings of a scheduler that make no path from pictures to noise."""
        gate.check_schedule(settings, where)

    def schedule(self, settings: dict[str, Any]) -> Any:
        """The noise schedule that trains, as `silentbad.model.diffusion` takes it."""
        return DDPMScheduler.from_config(settings)

    def schedule_of(self, scheduler: Any) -> Any:
        """The same, of a pipeline's own scheduler."""
        return scheduler

    # ---- captions
    def windows(self, tokenizers: dict[str, Any]) -> list[int]:
        """Tokens of a caption, for each tokenizer."""
        return [tokenizer.model_max_length for tokenizer in tokenizers.values()]

    def widths(self, backbone: Any, encoders: dict[str, Any]) -> tuple[int, int]:
        """(D, P): width of a text state and of the pooled one; 0 where nothing is pooled."""
        raise NotImplementedError

    def encode(
        self, encoders: dict[str, Any], tokens: list[Tensor], nonempty: Tensor | None, width: int
    ) -> tuple[Tensor, Tensor | None]:
        """(c, pooled) of tokens (B,L) by tokenizer; where nonempty (B,1) is 0 both are zero.
        `width` is D."""
        raise NotImplementedError

    def zero_empty(self, index: dict[str, Any]) -> bool:
        """Whether an empty caption has states of zeros, by the pipeline's model_index.json."""
        return False

    def text_facts(self, backbone: Any) -> list[Any]:
        """What the states of a text depend on beside encoders and tokenizers."""
        return []

    # ---- the prediction
    def predict(
        self,
        backbone: Any,
        noisy_latents: Tensor,
        timesteps: Any,
        encoder_hidden_states: Tensor,
        added: dict[str, Tensor],
    ) -> Tensor:
        """The prediction (B,C,h,w); timesteps as the backbone takes them; `added` has text_embeds
        (B,P) and time_ids (B,6) where there are some."""
        return backbone(
            noisy_latents,
            timesteps,
            encoder_hidden_states,
            added_cond_kwargs=added,
            return_dict=False,
        )[0]

    def unused(self, name: str, module: Any) -> list[nn.Parameter]:
        """Parameters of a component that get no gradient: they stay frozen."""
        return []

    # ---- fit
    def side(self, backbone: Any) -> int:
        """What the side of the latents must be a multiple of."""
        return 2 ** (len(backbone.config.block_out_channels) - 1)

    def largest(self, backbone: Any) -> int | None:
        """The largest side of the latents; None: no limit."""
        return None

    def check_fit(self, path: str, backbone: Any, encoders: dict[str, Any]) -> None:
        """Refuse text encoders whose states the backbone does not take."""
        raise NotImplementedError

    # ---- pipelines
    def options(self, zero_empty: bool) -> dict[str, Any]:
        """Arguments of the pipeline's class beside its components."""
        return {}

    def assemble(self, **components: Any) -> Any:
        """A plain diffusers pipeline."""
        raise NotImplementedError

    def prompt(self, prompts: list[str]) -> dict[str, Any]:
        """Arguments of the pipeline's `encode_prompt`."""
        return {"prompt": prompts}

    def sampling(self, config: Any, prefix: str) -> dict[str, Any]:
        """Arguments of the pipeline's call that only this family takes."""
        return {"guidance_rescale": config.guidance_rescale}

    def kohya_path(self, backbone: Any, path: str) -> str:
        """The name of one of the backbone's layers in kohya's programs."""
        return path

    def lora_tensors(self, pipe: Any, path: str) -> dict[str, Tensor]:
        """The tensors of a file of adapters, by diffusers' names, and the alphas of kohya's."""
        return with_alphas(*pipe.lora_state_dict(path, use_safetensors=True))


def refuse_width(path: str, backbone: str, takes: int, gives: int) -> None:
    """Refuse text states of another width than the backbone attends to."""
    if takes != gives:
        raise UserError(f"{path}: {backbone} attends to width {takes}, text_encoder gives {gives}")


def with_alphas(tensors: dict[str, Tensor], alphas: dict[str, float] | None) -> dict[str, Tensor]:
    """The tensors of a file of adapters, each layer's alpha among them."""
    return tensors | {name: torch.tensor(alpha) for name, alpha in (alphas or {}).items()}


def side_of(backbone: Any) -> int:
    """The side of the latents that a backbone was made for."""
    size = backbone.config.sample_size
    return size if isinstance(size, int) else size[0]
