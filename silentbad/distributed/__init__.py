"""Training over several processes: FSDP 2 shards, the gathering of a tensor from its shards, and
work of the main process alone.

The settings of a launch are accepted or refused here. Nothing here depends on data, model or
loss."""
