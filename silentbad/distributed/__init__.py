"""Training over several processes: FSDP 2 shards, what gathers a tensor from its shards.

What a launch may ask for is refused or accepted here. Nothing here knows what the tensors mean: no
data, no model, no loss."""
