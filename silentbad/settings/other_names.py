"""Names that other scripts and trainers have: what sets the same thing here."""

# Flags of other scripts and trainers that are refused: what to use instead.
SUCCESSORS = {
    "model_card": "use --pretrained_model_name_or_path",
    "clean_dataset_name": "use --clean_data_dir, a folder",
    "detector_model_arch": "use --validation.embedder",
    "guidance_scale": "use --validation.guidance_scale",
    "num_sample_steps": "use --validation.num_inference_steps",
    "num_images": "use --validation.images_per_target",
    "compute_tgt_gen_sim": "use --validation.targets; null switches similarity off",
    "finetune_image_saving_interval": "use --validation.steps, counted in optimizer steps",
    "break_after_success_k_times": "use --max_train_steps; a run that stops on its target cannot "
    "be compared",
    "with_special_char": "write the character into the captions",
    "exp_memo": "use --output_dir",
    "log_save_path": "use --output_dir",
    "wandb_mode": "use --report_to, or the environment variable WANDB_MODE",
    "debug": "use --dry_run",
    "local_rank": "accelerate launch sets it",
    **dict.fromkeys(("lr", "unet_lr", "text_encoder_lr"), "use --learning_rate"),
    **dict.fromkeys(("batch_size", "per_device_train_batch_size"), "use --train_batch_size"),
    **dict.fromkeys(("epochs", "max_train_epochs"), "use --num_train_epochs"),
    **dict.fromkeys(("steps", "max_steps"), "use --max_train_steps"),
    **dict.fromkeys(("save_every_n_steps", "save_steps"), "use --checkpointing_steps"),
    **dict.fromkeys(("instance_data_dir", "train_data"), "use --train_data_dir"),
    **dict.fromkeys(("use_lora", "lora_rank", "network_dim"), "use --lora.rank"),
    **dict.fromkeys(
        ("network_module", "network_args"), "use --lora.rank, and --lora.kind for another kind"
    ),
    "network_train_unet_only": "leave it out; text encoders train with --train_text_encoder alone",
    **dict.fromkeys(("lora_dropout", "network_dropout"), "leave it out; adapters have no dropout"),
    **dict.fromkeys(("min_snr", "min_snr_gamma"), "use --snr_gamma"),
    "ip_noise_gamma": "use --input_perturbation",
    "v_parameterization": "use --prediction_type v_prediction",
    **dict.fromkeys(("fp16", "bf16", "full_fp16", "full_bf16"), "use --mixed_precision"),
    "xformers": "use --enable_xformers_memory_efficient_attention, or leave it out for SDPA",
    "sdpa": "leave it out; SDPA is used unless xformers is asked for",
    **dict.fromkeys(
        ("cache_latents", "cache_latents_to_disk"),
        "leave it out; latents are kept wherever they do not change",
    ),
    "enable_bucket": "use --buckets",
    "shuffle_caption": "use --shuffle_phrases",
    "caption_extension": "leave it out; NAME.txt and NAME.caption are read",
    "clip_skip": "leave it out; the text encoder is used as the pipeline uses it",
    **dict.fromkeys(
        ("alpha_mask", "alpha_as_mask", "masked_training"),
        "name a mask beside each picture in the metadata, and use --memory.region.name",
    ),
    "network_alpha": "use --lora.alpha",
    "instance_prompt": "use --train_data_dir, whose metadata gives each picture its caption",
    "validation_prompt": "use --validation_prompts",
    "optimizer_type": "use --optimizer",
    "optimizer_args": "use --optimizer_options",
    "output_name": "use --output_dir",
    "save_every_n_epochs": "use --save_ckpt_epoch_interval",
    "sample_every_n_steps": "use --validation.steps",
    "sample_every_n_epochs": "use --validation_epochs",
    **dict.fromkeys(
        ("with_prior_preservation", "num_class_images"), "use --prior_preservation.num_images"
    ),
    "class_prompt": "use --prior_preservation.prompts, a file of prompts, one a line",
    "prior_loss_weight": "use --memory.roles.clean.loss_weight",
    "sample_batch_size": "leave it out; a batch of drawn pictures is halved where memory runs out",
    **dict.fromkeys(
        ("class_data_dir", "reg_data_dir"),
        "list its pictures as clean records of --train_data_dir, or let the base draw them: "
        "--prior_preservation.num_images",
    ),
}

# Names of layers in diffusers and peft: the patterns of --train_layers and --lora.targets.
LAYERS = {
    **{f"to_{part}": f"attn.{part} xattn.{part}" for part in "qkv"},
    **dict.fromkeys(("to_out", "to_out.0"), "attn.o xattn.o"),
    **{f"{part}_proj": f"attn.{part}" for part in "qkv"},
    "out_proj": "attn.o",
    **{f"add_{part}_proj": f"attn.context.{part}" for part in "qkv"},
    "to_add_out": "attn.context.o",
    "attn1": "attn",
    "attn2": "xattn",
    **dict.fromkeys(("ff.net.0.proj", "ff.net.2", "fc1", "fc2", "mlp"), "ff"),
    **dict.fromkeys(("proj_in", "proj_out"), "proj"),
    **dict.fromkeys(("conv1", "conv2"), "resnet.conv"),
    "conv_shortcut": "resnet.shortcut",
    "time_emb_proj": "time",
    **dict.fromkeys(("conv_in", "conv_out"), "io"),
    **dict.fromkeys(("downsamplers", "upsamplers"), "sampler"),
}
