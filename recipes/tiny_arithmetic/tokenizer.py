"""This module makes a character tokeniser with a chat template, for models that are trained here from scratch."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
CHARACTERS = "0123456789+-*/=().,:;?!<>^ \n"

# One conversation is one line of text: the template adds nothing that a four-layer model would have to learn.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def build_tokenizer(max_length_tokens: int) -> PreTrainedTokenizerFast:
    """Makes one token per character of ``CHARACTERS``, after the four special tokens; any other character is ``<unk>``.

    Args:
        max_length_tokens: the model's context length, stored as the tokeniser's ``model_max_length``.
    """
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=max_length_tokens,
        chat_template=CHAT_TEMPLATE,
    )
