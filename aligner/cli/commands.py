"""The commands of ``aligner`` and what each is for."""

from __future__ import annotations

COMMANDS: dict[str, str] = {
    "sft": "supervised fine-tuning on conversations",
    "rm": "train a reward model on preference pairs",
    "ppo": "PPO against a reward model or a function",
    "generate": "sample responses to prompts into a JSONL file",
    "evaluate": "compare checkpoints on fixed prompts",
    "pairs": "label sampled responses by a rule into preference pairs",
    "convert": "GGUF file, run or checkpoint to a Hugging Face directory",
    "checkpoint": "list, show, verify, export or remove the checkpoints of a run",
    "submit": "sft, rm, ppo, generate or evaluate as a job on a Slurm cluster",
    "status": "where a run stands: job, step, metrics, checkpoint, restarts",
    "report": "one self-contained HTML page about a run",
    "demo": "the whole pipeline on a small chat model",
}
