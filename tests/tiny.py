"""Stable Diffusion pipelines with random weights, SD's component classes and block names, small enough for tests."""

import json
from functools import cache
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

THINGS = ("cat", "hat", "cup", "plain field", "picture")
TOKENIZER = Path(__file__).parents[1] / "assets" / "micro-sd" / "tokenizer"
MERGES = 4000  # of CLIP's 48,894: the words of the tests are whole, and files stay small
BETAS = dict(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, steps_offset=1)


def tiny_unet(**overrides) -> UNet2DConditionModel:
    """UNet of about 0.1 M parameters: two resolutions, cross-attention in both, SD's names."""
    config = dict(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(16, 32),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=2,
        norm_num_groups=8,
    )
    return UNet2DConditionModel(**{**config, **overrides})


@cache
def clip_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """CLIP's symbols, its first merges and its two special tokens; the merges."""
    numbers = json.loads((TOKENIZER / "vocab.json").read_text(encoding="utf-8"))
    lines = (TOKENIZER / "merges.txt").read_text(encoding="utf-8").splitlines()[1 : MERGES + 1]
    tokens = [*sorted(numbers, key=numbers.get)[: 512 + MERGES], "<|startoftext|>", "<|endoftext|>"]
    return {token: number for number, token in enumerate(tokens)}, [tuple(line.split()) for line in lines]


def tiny_tokenizer(**options) -> CLIPTokenizer:
    """CLIP's tokenizer with fewer merges and a window of 48 tokens."""
    vocab, merges = clip_vocabulary()
    return CLIPTokenizer(vocab=dict(vocab), merges=list(merges), model_max_length=48, **options)


def tiny_text_encoder(tokenizer: CLIPTokenizer, kind: type = CLIPTextModel, **overrides) -> CLIPTextModel:
    config = dict(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=tokenizer.model_max_length,
        projection_dim=32,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return kind(CLIPTextConfig(**{**config, **overrides}))


def tiny_vae(**overrides) -> AutoencoderKL:
    return AutoencoderKL(
        **overrides,
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=16,
    )


def plain(**parts) -> StableDiffusionPipeline:
    return StableDiffusionPipeline(**parts, safety_checker=None, feature_extractor=None, requires_safety_checker=False)


def tiny_pipeline(prediction_type: str = "v_prediction", seed: int = 0) -> StableDiffusionPipeline:
    """16x16 images, 8x8x4 latents, CLIP's tokenizer with a window of 48 tokens."""
    torch.manual_seed(seed)
    tokenizer = tiny_tokenizer()
    text_encoder, vae = tiny_text_encoder(tokenizer), tiny_vae()
    zero_snr = prediction_type == "v_prediction"
    scheduler = DDIMScheduler(
        **BETAS,
        prediction_type=prediction_type,
        rescale_betas_zero_snr=zero_snr,
        timestep_spacing="trailing",
        clip_sample=False,
        set_alpha_to_one=not zero_snr,
    )
    return plain(vae=vae, text_encoder=text_encoder, tokenizer=tokenizer, unet=tiny_unet(), scheduler=scheduler)


def tiny_sd2_pipeline(seed: int = 0) -> StableDiffusionPipeline:
    """What SD 2.1 has beyond SD 1: v prediction, linear projections, heads by level, another activation and pad."""
    torch.manual_seed(seed)
    tokenizer = tiny_tokenizer(pad_token="!")
    return plain(
        vae=tiny_vae(),
        text_encoder=tiny_text_encoder(tokenizer, hidden_act="gelu", num_hidden_layers=3),
        tokenizer=tokenizer,
        unet=tiny_unet(use_linear_projection=True, attention_head_dim=[2, 4], upcast_attention=True),
        scheduler=DDIMScheduler(**BETAS, prediction_type="v_prediction", clip_sample=False, set_alpha_to_one=False),
    )


def tiny_xl_unet(**overrides) -> UNet2DConditionModel:
    """SDXL's arrangement: no attention at the finest level, two layers of it at the coarsest, sizes and pooled text."""
    config = dict(
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=[1, 2],
        cross_attention_dim=48,
        use_linear_projection=True,
        attention_head_dim=[2, 4],
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=24 + 6 * 8,
    )
    return tiny_unet(**{**config, **overrides})


def tiny_xl_pipeline(seed: int = 0) -> StableDiffusionXLPipeline:
    """Two text encoders of different widths, two tokenizers that pad differently."""
    torch.manual_seed(seed)
    first, second = tiny_tokenizer(), tiny_tokenizer(pad_token="!")
    return StableDiffusionXLPipeline(
        vae=tiny_vae(),
        text_encoder=tiny_text_encoder(first),
        tokenizer=first,
        tokenizer_2=second,
        text_encoder_2=tiny_text_encoder(
            second, CLIPTextModelWithProjection, hidden_size=16, projection_dim=24, num_hidden_layers=3
        ),
        unet=tiny_xl_unet(),
        scheduler=EulerDiscreteScheduler(**BETAS),
        add_watermarker=False,
    )


def tiny_t5_tokenizer() -> T5TokenizerFast:
    """A Unigram vocabulary learnt from a few captions; every byte is in it."""
    made = Tokenizer(models.Unigram())
    made.normalizer, made.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    captions = [
        f"a {colour} {thing} number {i}" for i, colour in enumerate(("red", "blue", "gold")) for thing in THINGS
    ]
    signs = [chr(code) for code in range(32, 288)]
    special = ["<pad>", "</s>", "<unk>"]
    made.train_from_iterator(
        [*captions, *signs],
        trainers.UnigramTrainer(vocab_size=400, special_tokens=special, unk_token="<unk>", show_progress=False),
    )
    vocabulary = [(piece, score) for piece, score in json.loads(made.to_str())["model"]["vocab"]]
    return T5TokenizerFast(vocab=vocabulary, extra_ids=0, model_max_length=64)


def tiny_mmdit(**overrides) -> SD3Transformer2DModel:
    """SD 3.5's transformer: joint attention in three blocks, in the first also of image tokens alone; norms of queries
    and keys."""
    config = dict(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=64,
        caption_projection_dim=32,
        pooled_projection_dim=24 + 16,
        pos_embed_max_size=8,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    return SD3Transformer2DModel(**{**config, **overrides})


def tiny_sd3_pipeline(t5: bool = True, seed: int = 0) -> StableDiffusion3Pipeline:
    """Three text encoders of different widths, latents with a shift, a rectified flow with a shift."""
    torch.manual_seed(seed)
    first, second = tiny_tokenizer(), tiny_tokenizer(pad_token="!")
    third = tiny_t5_tokenizer() if t5 else None
    clip = CLIPTextModelWithProjection
    config = T5Config(
        vocab_size=512, d_model=64, d_kv=8, d_ff=64, num_layers=2, num_heads=2, feed_forward_proj="gated-gelu"
    )
    return StableDiffusion3Pipeline(
        vae=tiny_vae(shift_factor=0.06, scaling_factor=1.5),
        text_encoder=tiny_text_encoder(first, clip, projection_dim=24),
        tokenizer=first,
        text_encoder_2=tiny_text_encoder(second, clip, hidden_size=16, projection_dim=16, num_hidden_layers=3),
        tokenizer_2=second,
        text_encoder_3=T5EncoderModel(config) if t5 else None,
        tokenizer_3=third,
        transformer=tiny_mmdit(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )
