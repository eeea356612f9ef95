"""A tiny random Llama with a tokenizer of words and digits, in a folder that `--model` can name."""

import re

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from foveal.compare.document import PEOPLE, Fact
from tests.hf.tiny import make

TEXT = "The quick brown fox jumps over the lazy dog.\nPack my box with five dozen jugs.\n" * 40
PIECE = r"\d|[A-Za-z]+|[^A-Za-z0-9]"


def tokenizer():
    known = Fact("", "0123456789")
    words = re.findall(PIECE, TEXT + known.sentence + known.question + " ".join(PEOPLE))
    vocabulary = {word: n for n, word in enumerate(["<pad>", *sorted(set(words))])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", unk_token="<pad>")


def save(folder):
    make("llama").save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
