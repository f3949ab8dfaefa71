"""Small real tokenizers, made in code, with the chat templates that matter."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "Hello there, how are you today? I am fine, thank you.",
    "What is the capital of France? The capital of France is Paris.",
    "Once upon a time there was a little girl who loved to read stories.",
    "Rewrite the sentence: He go to the park every day. He goes to the park every day.",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|begin|>", "<|head|>", "<|eot|>"]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (  # BOS from the template, content trimmed, no new line after a turn, a date
    "{{ bos_token }}{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y %H %M %S %f') %}"
    "{% endif %}{{ '<|head|>system<|head|>\\n\\nToday: ' + date_string + '<|eot|>' }}"
    "{% for m in messages %}{{ '<|head|>' + m['role'] + '<|head|>\\n\\n' + m['content'] | trim + '<|eot|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|head|>\\n\\n' }}{% endif %}"
)
MISTRAL = (  # no generation prompt of its own, a space before and after the answer, roles must alternate
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
QWEN3 = (  # an empty thought before the last answer only
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{ m['content'].split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
NO_END = (  # plain text, nothing ends a turn
    "{% for m in messages %}{{ '### ' + m['role'] + ':\\n' + m['content'] + '\\n\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:\\n' }}{% endif %}"
)
THINKS_AHEAD = CHATML.replace("assistant\\n", "assistant\\n<think>")

# name: (template, bos, eos, pad)
KINDS: dict[str, tuple[str | None, str | None, str | None, str | None]] = {
    "chatml": (CHATML, None, "<|im_end|>", "<|endoftext|>"),
    "chatml_other_eos": (CHATML, None, "<|endoftext|>", None),
    "pad_is_eos": (CHATML, None, "<|im_end|>", "<|im_end|>"),
    "llama3": (LLAMA3, "<|begin|>", "</s>", None),
    "mistral": (MISTRAL, "<s>", "</s>", None),
    "qwen3": (QWEN3, None, "<|im_end|>", "<|endoftext|>"),
    "no_end": (NO_END, None, "</s>", None),
    "no_template": (None, None, "</s>", None),
    "no_template_bos": (None, "<s>", "</s>", None),
    "thinks_ahead": (THINKS_AHEAD, None, "<|im_end|>", None),
    "no_eos": (CHATML, None, None, None),
}


def write_tokenizer(
    directory: Path, template: str | None, bos: str | None, eos: str | None, pad: str | None, spaces: bool = False
) -> Path:
    """A byte-level BPE tokenizer, or (``spaces``) one that puts a space before every text, as SentencePiece does."""
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.BPE(byte_fallback=spaces))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = list(SPECIAL)
    if spaces:
        prepend, replace = normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")
        backend.normalizer = normalizers.Sequence([prepend, replace])
        alphabet, special = [chr(i) for i in range(32, 127)], [*SPECIAL, *(f"<0x{i:02X}>" for i in range(256))]
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, special_tokens=special, show_progress=False),
    )
    if bos is not None:  # the tokenizer adds BOS by itself, like Llama's: a second one would show
        bos_id = backend.token_to_id(bos)
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, bos_id)])
    names = {"bos_token": bos, "eos_token": eos, "pad_token": pad}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **{k: v for k, v in names.items() if v})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(str(directory))
    return directory
