"""Tiny random Llama in a Hugging Face folder, created without network access."""

from __future__ import annotations

from pathlib import Path

import torch

VOCABULARY = 512
CORPUS = (
    "fork() copies a process; rfork copies the weights of a model.",
    "A seed serves chunks, a relay forwards what it has verified, a planner assigns each target its sources.",
    "The capital of France is Paris.",
)


def make_tiny_llama(folder: Path) -> None:
    """Write a Llama of hidden size 256 and 4 layers with tied embeddings (9 MB, bfloat16) to `folder`.

    The weights are the same each time. The folder has a config, a trained byte-level BPE tokenizer, and at
    least two shards.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(folder, max_shard_size="4MB")
