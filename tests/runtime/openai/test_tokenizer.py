"""Model directories: what is read from which file, and what a broken one says."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from datetime import datetime
from pathlib import Path

import pytest

from isthmus_runtime.commands.serve_engine import vocabulary_of
from isthmus_runtime.errors import ConfigError, InvalidRequest
from isthmus_runtime.openai.chat import ChatTemplate, Conversation
from isthmus_runtime.openai.tokenizer import Tokenizer

SMOLLM = Path.home() / ".cache/isthmus/models/smollm2-135m-instruct"
MESSAGES = [
    {"role": "system", "content": "You are <brief> & kind."},
    {"role": "user", "content": "Grüße 🙂\nsecond line"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Bye."},
]
TEMPLATES = {
    "blocks": (
        "{%- if messages[0]['role'] == 'system' %}\n    {{- bos_token + messages[0]['content'] }}\n{%- endif %}\n"
        "{% for m in messages %}\n    {% if loop.index0 > 2 %}\n        {% break %}\n    {% endif %}\n"
        "[{{ m.role | upper }}] {{ m.content | trim }}\n{% endfor %}\n"
        "{% if add_generation_prompt %}{{ '[ASSISTANT]' }}{% endif %}"
    ),
    "json": "{{ messages | tojson }}|{{ messages[0] | tojson(indent=2) }}|{{ eos_token }}|{{ tools is none }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}",
    "undefined": "{{ nothing }}{% if nothing is defined %}x{% endif %}{{ bos_token }}",
}


def copy(model_dir, tmp_path, **files):
    """The model directory with some files replaced: text, an object, or None to remove."""
    root = tmp_path / "copy"
    shutil.copytree(model_dir, root)
    for name, content in files.items():
        path = root / name.replace("_json", ".json").replace("_jinja", ".jinja")
        if content is None:
            path.unlink()
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
    return root


def test_ids_and_defaults(model_dir, tmp_path):
    root = copy(model_dir, tmp_path, generation_config_json={"eos_token_id": [2, 0], "temperature": 0.6, "top_k": 20})
    tokenizer = Tokenizer.load(root)
    assert tokenizer.eos_token_ids == (2, 0)
    assert (tokenizer.defaults.temperature, tokenizer.defaults.top_k, tokenizer.defaults.top_p) == (0.6, 20, 1.0)
    text = "größer als 🙂"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([1, *tokenizer.encode("a"), 2]) == "a"


def test_a_long_text_lets_other_threads_run(tokenizer):
    before = sys.getswitchinterval()
    inside, seen = False, False

    def work(text: str) -> None:
        nonlocal inside
        inside = True
        tokenizer.encode(text)
        inside = False

    # From here on the interpreter's lock changes hands only where it is given up: in the encoding call, or nowhere.
    sys.setswitchinterval(1000)
    try:
        for size in (1 << n for n in range(10, 20)):  # longer and longer, until this thread wakes up in time
            thread = threading.Thread(target=work, args=(" ".join(f"{i:x}word" for i in range(size)),))
            thread.start()
            while thread.is_alive() and not seen:
                seen = inside
                thread.join(0.001)
            thread.join()
            if seen:
                return
    finally:
        sys.setswitchinterval(before)
    pytest.fail("no other thread ran while a text was encoded")


@pytest.mark.parametrize(("setting", "begins"), [(True, True), (False, False), (None, False)])
def test_add_bos_token(model_dir, tmp_path, setting, begins):
    config = {"bos_token": "<|im_start|>", "chat_template": "a"} | (
        {} if setting is None else {"add_bos_token": setting}
    )
    tokenizer = Tokenizer.load(copy(model_dir, tmp_path, tokenizer_config_json=config))
    assert (tokenizer.encode("a")[0] == 1) is begins
    assert tokenizer.chat(Conversation(messages=MESSAGES)).ids[0] != 1


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_json": None}, "there is no tokenizer.json"),
        ({"tokenizer_json": "{"}, "tokenizer.json"),
        ({"config_json": {"vocab_size": "many"}}, "vocab_size is 'many', expected a whole number"),
        ({"config_json": {"text_config": [1]}}, "text_config is .1., expected an object"),
        ({"tokenizer_config_json": "[]"}, "holds a JSON list, expected an object"),
        ({"tokenizer_config_json": {"chat_template": "{% if %}"}}, "chat template, line 1"),
        ({"tokenizer_config_json": {"chat_template": "{{" + "(" * 5_000 + "1" + ")" * 5_000 + "}}"}}, "nested too"),
        ({"tokenizer_config_json": {"add_bos_token": True, "bos_token": "<s>"}}, "bos_token '<s>' is not a token"),
        ({"generation_config_json": {"temperature": "hot", "top_p": 3}}, "temperature 'hot'.*\n.*top_p 3"),
    ],
)
def test_broken_directories(model_dir, tmp_path, files, message):
    with pytest.raises(ConfigError, match=message):
        Tokenizer.load(copy(model_dir, tmp_path, **files))


def test_template_file_comes_first_and_named_templates_work(model_dir, tmp_path):
    tokenizer = Tokenizer.load(copy(model_dir, tmp_path, chat_template_jinja="FILE"))
    assert tokenizer.chat(Conversation(messages=MESSAGES)).text == "FILE"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    tokenizer = Tokenizer.load(copy(model_dir, tmp_path / "2", tokenizer_config_json={"chat_template": named}))
    assert tokenizer.chat(Conversation(messages=MESSAGES)).text == "D"


def test_no_template_says_what_to_use(model_dir, tmp_path):
    tokenizer = Tokenizer.load(copy(model_dir, tmp_path, tokenizer_config_json={}))
    with pytest.raises(InvalidRequest, match=r"no chat template.*/v1/completions"):
        tokenizer.chat(Conversation(messages=MESSAGES))


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_renders_as_transformers_does(model_dir, source):
    transformers = pytest.importorskip("transformers")
    peer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(model_dir / "tokenizer.json"), bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    expected = peer.apply_chat_template(MESSAGES, chat_template=source, tokenize=False, add_generation_prompt=True)
    ours = ChatTemplate(source, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"})
    assert ours.render(Conversation(messages=MESSAGES)) == expected


def test_template_clock_and_refusal():
    now = lambda: datetime(2031, 5, 6)  # noqa: E731
    assert ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, now).render(Conversation(messages=[])) == "06 May 2031"
    with pytest.raises(InvalidRequest, match="refuses them: roles must alternate") as caught:
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}).render(Conversation(messages=[]))
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}", "{{ messages[0].x.y }}"],
)
def test_template_sandbox(source):
    with pytest.raises(InvalidRequest, match="chat template fails"):
        ChatTemplate(source, {}).render(Conversation(messages=[{"role": "user", "content": "x"}]))


@pytest.mark.skipif(not SMOLLM.is_dir(), reason="needs `make model`")
def test_imported_model():
    tokenizer = Tokenizer.load(SMOLLM)
    prompt = tokenizer.chat(Conversation(messages=[{"role": "user", "content": "Hi"}]))
    assert prompt.text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = prompt.ids
    assert tokenizer.eos_token_ids and tokenizer.eos_token_ids[0] in ids
    assert max(ids) < tokenizer.vocab_size


def test_engines_of_any_role_tell_by_which_tokenizer_their_ids_are(model_dir, tmp_path):
    assert vocabulary_of(str(model_dir)) == Tokenizer.load(model_dir).digest
    assert vocabulary_of(str(tmp_path)) == "", "nobody can tell"
