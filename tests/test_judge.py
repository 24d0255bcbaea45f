"""Fluency under a judge: against one plain forward pass for each text, in fp64, without batches or kept columns."""

import pytest
import torch
from conftest import VOCAB, make_model, make_tokenizer
from tolerances import room

import misvo
from misvo import embedded, judge

PROMPTS = ["a b c", "d", "e f g h i j k l", "m n", "a b c"]
RESPONSES = ["d e f g h", "b", "o p q r s t u v w x y z a b", "c d e", "h g f e d c b a a a a a"]


def mean_logprob(model, context, tokens):
    """By the definition: every token from all before it, one at a time."""
    total = 0.0
    for place, token in enumerate(tokens):
        logits = model(input_ids=torch.tensor([[*context, *tokens[:place]]])).logits[0, -1].double()
        total += logits[token] - torch.log(logits.exp().sum())
    return total / len(tokens)


def words(text):
    return [make_tokenizer().convert_tokens_to_ids(word) for word in text.split()]


def context_of(prompt, chat):
    return words(f"<user> {prompt} <assistant>") if chat else words(prompt)  # white space is no token here


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "lfm2", "granite", "gptj-bias"])
@pytest.mark.parametrize("chat", [False, True])
def test_fluency_is_the_mean_logprob_of_a_plain_forward_pass(architecture, chat, monkeypatch):
    model = make_model(architecture)
    made = judge.Judge(model, make_tokenizer(chat))
    monkeypatch.setattr(judge, "MOST_LOGITS", 40 * VOCAB)  # so that a batch is cut, too

    @torch.no_grad()
    def expected(model):
        pairs = zip(PROMPTS, RESPONSES, strict=True)
        return torch.stack([mean_logprob(model, context_of(prompt, chat), words(text)) for prompt, text in pairs])

    found = torch.tensor(made.fluency(PROMPTS, RESPONSES), dtype=torch.float64)
    exact = expected(make_model(architecture).double())
    assert exact.std() > 0.1  # responses that differ: a mix-up of rows would show
    assert (found - exact).norm() <= room(expected, model)


def test_a_batch_changes_nothing_and_keeps_the_order(monkeypatch):
    made = judge.Judge(make_model("llama"), make_tokenizer())
    sizes = []
    logprobs = judge.Judge._logprobs
    monkeypatch.setattr(judge.Judge, "_logprobs", lambda self, texts: sizes.append(len(texts)) or logprobs(self, texts))
    together = made.fluency(PROMPTS * 4, RESPONSES * 4)
    assert max(sizes) > 1 and sum(sizes) == 20
    alone = [made.fluency([prompt], [text])[0] for prompt, text in zip(PROMPTS, RESPONSES, strict=True)]
    assert together == pytest.approx(alone * 4, abs=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "gptj-bias"])
def test_the_logits_of_a_batch_stay_within_their_bound(architecture, monkeypatch):
    """With kept columns and, for a model that does not take that option, without; a single text may be larger."""
    model, shapes = make_model(architecture), []
    made = judge.Judge(model, make_tokenizer())
    monkeypatch.setattr(made, "_keeps", architecture == "llama")
    monkeypatch.setattr(judge, "MOST_LOGITS", 30 * VOCAB)
    model.register_forward_hook(lambda module, inputs, output: shapes.append(output.logits.shape))
    found = made.fluency(PROMPTS * 4, RESPONSES * 4)
    assert all(rows == 1 or rows * columns <= 30 for rows, columns, _ in shapes) and max(shapes)[0] > 1
    monkeypatch.undo()
    assert found == pytest.approx(made.fluency(PROMPTS * 4, RESPONSES * 4), abs=1e-5)


def test_empty_responses_are_not_judged():
    made = judge.Judge(make_model("llama"), make_tokenizer())
    found = made.fluency(["a", "a", "a"], ["", "b", " \n"])
    assert found[0] is None and found[2] is None and found[1] < 0
    assert made.fluency([], []) == []


def test_per_byte_counts_utf8_and_asks_for_a_known_unit():
    made = judge.Judge(make_model("llama"), make_tokenizer())
    text = "a b  ü c"  # 4 words, 9 bytes; ü is the unknown token z
    token, byte = made.fluency(["a"], [text])[0], made.fluency(["a"], [text], per="byte")[0]
    assert token * 4 == pytest.approx(byte * 9)
    with pytest.raises(misvo.MisvoError, match="per token or byte"):
        made.fluency(["a"], ["b"], per="word")


def test_a_long_prompt_loses_its_start_but_for_the_first_token_and_a_long_response_its_end():
    model = make_model("llama")  # a window of 128
    made = judge.Judge(model, make_tokenizer())
    prompt, letters = [f"w{n % 9}" for n in range(200)], "b c d e f g"
    with torch.no_grad():
        expected = mean_logprob(model, words(" ".join([prompt[0], *prompt[-121:]])), words(letters))
    assert made.fluency([" ".join(prompt)], [letters])[0] == pytest.approx(float(expected), abs=1e-4)
    response = " ".join(prompt)
    with torch.no_grad():
        logits = (
            model(input_ids=torch.tensor([[*words("a"), *words(response)[:127]]]))
            .logits[0, :-1]
            .double()
            .log_softmax(-1)
        )
    expected = logits.gather(-1, torch.tensor(words(response)[:127])[:, None]).mean()
    assert made.fluency(["a b c"], [response])[0] == pytest.approx(float(expected), abs=1e-4)


def test_a_control_token_in_a_response_is_taken_for_words():
    """An end of text that a response spells out must not be read as one: here it is part of an unknown word."""
    tokenizer = make_tokenizer()
    assert tokenizer("b</s>c")["input_ids"] == words("b </s> c")
    made = judge.Judge(make_model("llama"), tokenizer)
    assert made._encode("a", "b</s>c").tokens == words("z")
    assert tokenizer("b</s>c")["input_ids"] == words("b </s> c")  # the tokenizer is as it was


def test_any_model_of_a_folder_and_the_ones_that_are_none(tmp_path):
    model, tokenizer = make_model("gemma3"), make_tokenizer()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = misvo.Judge.from_pretrained(tmp_path)
    own = judge.Judge(model, tokenizer)
    assert loaded.fluency(PROMPTS, RESPONSES) == pytest.approx(own.fluency(PROMPTS, RESPONSES), abs=1e-4)
    with pytest.raises(misvo.MisvoError, match="no model could be loaded from the name 'nowhere/at-all'"):
        misvo.Judge.from_pretrained("nowhere/at-all")
    with pytest.raises(misvo.MisvoError, match=r"call model\.eval"):
        judge.Judge(make_model("llama").train(), tokenizer)


def test_parts_of_a_model_are_joined_in_order_and_held_to_their_fingerprint(tmp_path, monkeypatch):
    import hashlib

    parts = []
    for name, content in (("one", b"first "), ("two", b"second")):
        folder = tmp_path / f"wheel_{name}" / "data"
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").write_text("")
        (folder / "x.part").write_bytes(content)
        parts.append((f"wheel_{name}", "data/x.part"))
    monkeypatch.syspath_prepend(str(tmp_path))
    whole = hashlib.sha256(b"first second").hexdigest()
    entry = embedded.Embedded("wheel", "x.gguf", "wheel==1", "", parts=tuple(parts), sha256=whole)
    monkeypatch.setitem(embedded.MODELS, "parted", entry)
    monkeypatch.setenv("MISVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "convert", lambda gguf, folder, bos: (folder / "seen").write_bytes(gguf.read_bytes()))
    folder = embedded.model_folder("parted")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"seen": b"first second"}
    (tmp_path / "wheel_two" / "data" / "x.part").write_bytes(b"torn")
    monkeypatch.setenv("MISVO_CACHE", str(tmp_path / "other"))
    with pytest.raises(misvo.MisvoError, match=r"wheel_one, wheel_two is damaged.*--force-reinstall"):
        embedded.model_folder("parted")
    (tmp_path / "wheel_two" / "data" / "x.part").unlink()
    with pytest.raises(misvo.MisvoError, match="pip install wheel==1"):
        embedded.model_folder("parted")


@pytest.mark.slow  # the first time, when it is converted
def test_gemma_finds_sentences_more_fluent_than_their_words_in_disorder():
    try:
        embedded.wheel_paths(embedded.MODELS["gemma3-270m"])
    except misvo.MisvoError as error:
        pytest.skip(str(error))
    gemma = misvo.Judge.from_pretrained("gemma3-270m")
    prompt = "Give me one tip for sleeping better."
    plain = "Try to go to bed at the same time every night, and keep your room dark and cool."
    mixed = "dark bed Try night the to and to at every cool your time same keep and go room."
    fluent, broken = gemma.fluency([prompt] * 2, [plain, mixed])
    assert -3.5 < fluent < -1.0 and broken < fluent - 2
    assert gemma._encode(prompt, plain).context[0] == gemma.tokenizer.bos_token_id and gemma.vocab_size == 262_144
