"""Comparing checkpoints on fixed prompts: responses, judges, statistics with intervals, results on disk."""
