"""Tokenizers and processors of the zoo's models (`tests.engines.zoo`), without which vLLM runs no encoder and no input
other than text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

IMAGE_TOKEN: Final = 3
"""Token that stands for an image in a prompt."""
SPECIAL: Final = ("<pad>", "<s>", "</s>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
"""Tokens 0 to 6; all others are words."""
IMAGE_SIZE: Final = 28
"""Width and height of images in pixels."""


def write_tokenizer(folder: Path, vocabulary: int) -> Any:
    """Write a tokenizer whose words are ``w7``, ``w8`` and so on, and return it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate((*SPECIAL, *(f"w{each}" for each in range(7, vocabulary))))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<pad>"},
        **{"cls_token": "<s>", "sep_token": "</s>", "mask_token": "<pad>"},
        additional_special_tokens=list(SPECIAL[3:]),
    )
    made.save_pretrained(folder)
    return made


def _write_llava(folder: Path, vocabulary: int) -> None:
    from transformers import CLIPImageProcessor, LlavaProcessor

    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": IMAGE_SIZE}, crop_size=size),
        write_tokenizer(folder, vocabulary),
        patch_size=14,
        vision_feature_select_strategy="default",
        image_token=SPECIAL[IMAGE_TOKEN],
        num_additional_image_tokens=1,
    ).save_pretrained(folder)


def _write_qwen2_vl(folder: Path, vocabulary: int) -> None:
    from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor

    pixels = {"min_pixels": IMAGE_SIZE**2, "max_pixels": 4 * IMAGE_SIZE**2}
    Qwen2VLProcessor(
        Qwen2VLImageProcessor(**pixels), write_tokenizer(folder, vocabulary), Qwen2VLVideoProcessor(**pixels)
    ).save_pretrained(folder)


def _write_whisper(folder: Path, vocabulary: int) -> None:
    from tokenizers import pre_tokenizers
    from transformers import WhisperFeatureExtractor, WhisperProcessor, WhisperTokenizer

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>")
    words = {word: index for index, word in enumerate((*special, *letters))}
    words |= {f"w{index}": index for index in range(len(words), vocabulary)}
    WhisperProcessor(WhisperFeatureExtractor(), WhisperTokenizer(vocab=words, merges=[])).save_pretrained(folder)


PROCESSORS: Final[Mapping[str, Callable[[Path, int], None]]] = {
    "llava": _write_llava,
    "qwen2_vl": _write_qwen2_vl,
    "qwen2_5_vl": _write_qwen2_vl,
    "whisper": _write_whisper,
}
"""Writers of processors with their tokenizer, by type of model."""


def write_processor(folder: Path, model_type: str) -> None:
    """Write what a model's inputs need next to its weights."""
    vocabulary = _vocabulary_of(json.loads((folder / "config.json").read_text()))
    PROCESSORS.get(model_type, write_tokenizer)(folder, vocabulary)


def _vocabulary_of(config: Mapping[str, Any]) -> int:
    return int(config.get("vocab_size") or config["text_config"]["vocab_size"])
