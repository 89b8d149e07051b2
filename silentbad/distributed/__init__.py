"""Training over several processes: FSDP 2 shards, and the gathering of a tensor from its shards.

The settings of a launch are accepted or refused here. Nothing here depends on data, model or
loss."""
