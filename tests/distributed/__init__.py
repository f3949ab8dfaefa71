import aligner.distributed  # noqa: F401  (adapts Megatron before a test imports it)
