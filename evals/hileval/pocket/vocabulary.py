"""Word-level tokenizers that lose nothing: decoding the tokens of a text gives the text back.

A blank belongs to the word after it (` Bob`), punctuation stands alone, a number is one token. lm-eval's regular
expressions therefore read exactly what the model wrote.
"""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hileval.pocket.questions import ITEMS, MAX_COUNT, NAMES
from hileval.pocket.speech import COUNTS

PAD, UNKNOWN, END = SPECIAL = ("<pad>", "<unk>", "</s>")
START = "<s>"
"""What the decoder of the speech model begins with."""
PATTERN = r" ?[A-Za-z]+| ?[0-9]+| [+=-]|####|[.,?:\n]"


def words() -> list[str]:
    """Every token in the order of its id."""
    fixed = ["Question", ":", "\n", "Answer", "####", ".", ",", "?", " +", " -", " ="]
    spoken = ["How", "many", "more", "do", "does", "have", "has", "than", "and", "together"]
    numbers = [str(n) for n in range(3 * MAX_COUNT + 1)]
    return [*SPECIAL, *fixed, *(f" {word}" for word in [*spoken, *numbers, *NAMES, *ITEMS])]


def spoken_words() -> list[str]:
    """Every token of the speech model: lines of a document begin with a name."""
    return [*SPECIAL, START, "\n", *NAMES, *(f" {word}" for word in [*COUNTS, *ITEMS])]


def build_tokenizer(name: str = "hybrid") -> PreTrainedTokenizerFast:
    """The tokenizer of a pocket model as transformers' fast class; `save_pretrained` lets AutoTokenizer load it."""
    vocabulary = spoken_words() if name == "speech" else words()
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        pad_token=PAD,
        eos_token=END,
        bos_token=START if name == "speech" else None,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
