"""Aligner: RLHF training (SFT, reward model, PPO, evaluation) on Megatron-core."""

__version__ = "0.1.0"
