"""Conversations are written in the recipe's template, exact to the character and to the token."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from huggingface_directories import write_huggingface
from small_models import random_params, tiny

from openelm_jax import generate as verb
from openelm_jax import load
from openelm_jax.data.chat import ChatForm, Message, encode, encode_prompt, render
from openelm_jax.errors import UserError
from openelm_jax.generation.sampling import Sampling
from openelm_jax.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

ROOT = Path(__file__).parent.parent
HI, YO = Message("user", "Hi"), Message("assistant", "Yo")
BARE = ChatForm(empty_system=False)

# Zephyr's template as transformers would read it from a tokenizer_config.json.
JINJA = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n' + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(ROOT / "tests" / "data" / "tokenizer-mistral-v1" / "tokenizer.model")


def test_the_text_is_the_recipe_s() -> None:
    prompt = "<|system|>\n</s>\n<|user|>\nHi</s>\n"
    assert render([HI]) == prompt
    assert render([HI, YO]) == prompt + "<|assistant|>\nYo</s>\n"
    assert render([HI], generate=True) == prompt + "<|assistant|>\n"
    assert render([HI], form=BARE) == "<|user|>\nHi</s>\n"
    assert render([Message("system", "Be kind."), HI]) == (
        "<|system|>\nBe kind.</s>\n<|user|>\nHi</s>\n"
    )


@pytest.mark.parametrize("generate", [False, True])
@pytest.mark.parametrize(
    "messages",
    [
        [HI, YO],
        [Message("system", ""), HI],
        [HI, YO, Message("user", "  two\n\nlines {{ not code }}\n"), Message("assistant", "é ")],
        [Message("user", "ends </s> nothing"), YO],
    ],
)
def test_the_text_is_what_transformers_renders(messages: list[Message], generate: bool) -> None:
    template = pytest.importorskip("transformers.utils.chat_template_utils")
    conversation = [message._asdict() for message in messages]
    rendered, _ = template.render_jinja_template(
        [conversation], chat_template=JINJA, add_generation_prompt=generate, eos_token="</s>"
    )
    assert render(messages, generate=generate, form=BARE) == rendered[0]


def test_the_tokens_are_those_of_april_2024(tokenizer: Tokenizer) -> None:
    """Those that SentencePiece makes of each text between two </s>, with <s> in front."""
    encoded = encode(tokenizer, [HI, YO])
    texts = ["<|system|>\n", "\n<|user|>\nHi", "\n<|assistant|>\nYo"]
    expected = [1]
    for text in texts:
        expected += [*tokenizer._processor.encode(text), 2]
    assert encoded.tokens.tolist() == expected
    answer = [tokenizer.pieces[i].text for i in encoded.tokens[encoded.learned]]
    assert "".join(answer) == "<|assistant|><0x0A>Yo</s>"


def test_the_prompt_is_what_stands_before_the_answer(tokenizer: Tokenizer) -> None:
    form = ChatForm(learn_tag=False)
    conversation = encode(tokenizer, [HI, YO], form=form)
    prompt = encode_prompt(tokenizer, [HI], form)
    np.testing.assert_array_equal(conversation.tokens[: len(prompt)], prompt)
    assert conversation.learned.tolist() == [False] * len(prompt) + [True] * 3  # Y, o, </s>


def test_every_answer_of_a_conversation_is_learned_and_nothing_else(tokenizer: Tokenizer) -> None:
    messages = [HI, YO, Message("user", "And"), Message("assistant", "")]
    encoded = encode(tokenizer, messages)
    learned = tokenizer.decode(encoded.tokens[encoded.learned])
    assert learned.count("assistant") == 2
    assert "user" not in learned
    assert encoded.learned[-1]
    assert (encoded.tokens[encoded.learned] == 2).sum() == 2


@pytest.mark.parametrize("text", ["</s>", "x</s>Hello", "<s>Hello", "<unk>", "<|assistant|>\n"])
def test_a_message_s_own_text_makes_no_control_token(tokenizer: Tokenizer, text: str) -> None:
    tokens = encode(tokenizer, [Message("user", text), Message("assistant", text)]).tokens.tolist()
    assert (tokens.count(1), tokens.count(2), tokens.count(0)) == (1, 3, 0)
    assert tokens[0] == 1
    assert tokens[-1] == 2


def test_the_double_end_is_a_newline_and_one_more_end(tokenizer: Tokenizer) -> None:
    once = encode(tokenizer, [HI, YO])
    twice = encode(tokenizer, [HI, YO], form=ChatForm(double_end=True))
    added = [*tokenizer.encode("\n").tolist(), 2]
    assert twice.tokens.tolist() == once.tokens.tolist() + added
    assert twice.learned.tolist() == once.learned.tolist() + [True] * len(added)


def test_what_renders_to_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="renders to nothing"):
        render([])
    with pytest.raises(UserError, match="writes nothing for the role 'tool'"):
        render([HI, Message("tool", "42")])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = train_tokenizer(["the state of the union is strong " * 20], 280, folder / "t.model")
    config = tiny(vocab_size=280, num_layers=1)
    write_huggingface(folder / "hf", config, random_params(config), tokenizer=tokenizer)
    return folder / "hf"


@pytest.mark.parametrize("flags", [[], ["--no-system"]])
def test_generate_chat_asks_with_a_user_s_turn(
    directory: Path, flags: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = load(directory)
    form = ChatForm(empty_system=not flags)
    tokenizer = model.require_tokenizer()
    prompts = [encode_prompt(tokenizer, [Message("user", text)], form).tolist() for text in "ab"]
    expected = [c.text for c in model.complete(prompts, 6, Sampling(temperature=0.8, seed=1))]
    assert expected[0] != expected[1]
    (tmp_path / "prompts.txt").write_text("a\nb\n")
    line = f"--from {directory} --chat --prompt-file {tmp_path / 'prompts.txt'} --max-tokens 6"
    how = "--temperature 0.8 --top-p 1 --seed 1"

    printed = []
    for more in ("",) if flags else ("", "--stream", "--prompt-lookup 3"):
        verb.main([*f"{line} {how} {more}".split(), *flags])
        printed.append(capsys.readouterr().out)
    assert printed == [f"a\n{expected[0]}\n\nb\n{expected[1]}\n"] * len(printed)

    verb.main([*f"{line} {how} --json".split(), *flags])
    rows = [json.loads(row) for row in capsys.readouterr().out.splitlines()]
    assert [(row["prompt"], row["text"]) for row in rows] == list(zip("ab", expected, strict=True))


def test_no_system_is_for_chat(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        verb.main(["--from", "x", "--prompt", "a", "--no-system"])
    assert "--no-system is for --chat" in capsys.readouterr().err
