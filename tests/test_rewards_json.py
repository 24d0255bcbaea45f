"""`json` and `json:{schema}`: the reader against Python's, the shares against hand counts and against jsonschema."""

import json
import re
import socket
import time

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import misvo
from misvo import rewards
from misvo.rewards import JsonShape, json_shape, json_text

PERSON = {
    "type": "object",
    "required": ["name", "age"],
    "properties": {"name": {"type": "string", "pattern": "^[A-Z]"}, "age": {"type": "integer", "minimum": 0}},
}
NODE = {"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {"in": {"$ref": "#/$defs/node"}}}}}
BESIDE = {"$ref": "#/definitions/a", "minimum": 5, "definitions": {"a": {"type": "integer"}}}
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([0.5, 1.0, 1e300])
    | st.text('ab\n"\\é', max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


def score(schema, *texts):
    return JsonShape(schema)(prompts=["p"] * len(texts), completions=[*texts])


def is_json(text):
    def refuse(name):
        raise ValueError(name)

    try:
        json.loads(text.strip(), parse_constant=refuse)
    except ValueError:
        return False
    return True


@given(VALUES, st.sampled_from([None, 1]), st.booleans(), st.data())
def test_json_is_read_to_its_end_and_every_beginning_is_open(value, indent, fenced, data):
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    text = f" ```json\n{text}\n```\n" if fenced else text
    reading = json_text.read(text)
    assert reading.complete and json.loads(reading.closed) == value
    cut = data.draw(st.integers(1, len(text)))
    beginning = json_text.read(text[:cut])
    assert beginning.complete or beginning.valid == beginning.length
    if beginning.closed:
        json.loads(beginning.closed)


@given(st.text(alphabet='[]{}",:-+.eE019 \\utrfalsn`N\x01', max_size=14))
def test_the_reader_agrees_with_pythons(text):
    reading = json_text.read(text)
    if "```" not in text:
        assert reading.complete == is_json(text)
    assert reading.valid <= reading.length
    if reading.closed:
        assert is_json(reading.closed)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": [1, 2.5e-3, null, "x\\u00e9"]}', 1),
        ("42", 1),
        ('```json\n{"a": 1}\n```', 1),
        ('```\n{"a": 1}', 1),  # Markdown ends a fence with the text
        ('{"a": 1', 1 / 2),
        ('{"a": tr', 1 / 2),
        ('["\\u12', 1 / 2),
        ("```js", 1 / 2),
        ("[1, 2,]", 6 / 7 / 2),
        ('{"a": 1} bye', 9 / 12 / 2),
        ("[NaN]", 1 / 5 / 2),
        ("[-Infinity]", 1 / 11 / 2),
        ('{"a": 1}{', 8 / 9 / 2),
        ("[01]", 2 / 4 / 2),
        ('["\x00"]', 2 / 5 / 2),
        ("Sure! {}", 0),
        (" \n ", 0),
        ("", 0),
        ("[" * 100_000, 1 / 2),
        ("[" * 50_000 + "]" * 50_000, 1),
        ("9" * 100_000, 1),
    ],
)
def test_json_by_hand(text, expected):
    assert score(None, text) == [pytest.approx(expected)]


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        # type, two names, name with type and pattern, age with type and minimum: five requirements
        (PERSON, '{"name": "Bo", "age": 3}', 1),
        (PERSON, '{"name": "bo", "age": 3}', (1 + 2 + 0.5 + 1) / 5),
        (PERSON, '{"name": "Bo", "age": "3"}', (1 + 2 + 1 + 0) / 5),
        (PERSON, '{"name": "Bo"}', (1 + 1 + 1 + 0) / 5),
        (PERSON, "{}", 1 / 5),
        (PERSON, "[]", 0),
        (PERSON, "no", 0),
        (PERSON, '{"name": "Bo", "ag', (1 + 1 + 1 + 0) / 5 / 2),  # as if closed after "Bo", and half
        (PERSON, '{"name": "Bo", ag', (1 + 1 + 1 + 0) / 5 / 2 * 15 / 17),
        (PERSON, '"na', 0),
        ({"required": ["a", "b"]}, '{"a": 1}', 1 / 2),
        ({"items": {"type": "integer"}, "minItems": 1}, '[1, "2", 3, null]', (1 / 2 + 1) / 2),
        ({"anyOf": [{"required": ["a", "b"]}, {"required": ["c"]}]}, '{"a": 1}', 1 / 2),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, '{"a": 1, "b": 1}', 0),
        ({"allOf": [{"required": ["a"]}, {"required": ["b"]}]}, '{"a": 1}', 1 / 2),
        (NODE, '{"in": {"in": {"in": 3}}}', 3 / 4 + 1 / 8),
        (BESIDE, "1", 1 / 2),
        (BESIDE | {"$schema": "http://json-schema.org/draft-07/schema#"}, "1", 1),  # reads nothing beside a reference
        ({"uniqueItems": True}, '[1, true, "1", [1], {"a": 1}]', 1),
        ({"uniqueItems": True}, '[{"a": 1}, {"a": 1.0}]', 0),
    ],
)
def test_shares_by_hand(schema, text, expected):
    assert score(schema, text) == [pytest.approx(expected)]


LEAVES = st.sampled_from(
    [
        True,
        False,
        {"type": "object"},
        {"type": ["integer", "null"]},
        {"required": ["a", "b"]},
        {"minimum": 1, "type": "number"},
        {"enum": [1, "a", [1]]},
        {"pattern": "^a", "minLength": 2},
        {"uniqueItems": True, "maxItems": 2},
        {"$ref": "#/$defs/other"},
    ]
)


def _wider(inner):
    some = st.lists(inner, min_size=1, max_size=2)
    named = st.dictionaries(st.sampled_from("abc"), inner, max_size=2)
    objects = st.fixed_dictionaries(
        {"properties": named}, optional={"required": st.just(["a"]), "additionalProperties": inner, "not": inner}
    )
    arrays = st.fixed_dictionaries({"items": inner}, optional={"prefixItems": some, "contains": inner})
    choices = st.fixed_dictionaries(
        {}, optional={"anyOf": some, "oneOf": some, "allOf": some, "$ref": st.just("#/$defs/other")}
    )
    conditional = st.fixed_dictionaries({"if": inner, "then": inner, "else": inner})
    return objects | arrays | choices | conditional


@pytest.mark.parametrize("dialect", [None, "http://json-schema.org/draft-07/schema#"])
@settings(deadline=None)  # a schema is checked against its own schema first
@given(schema=st.recursive(LEAVES, _wider, max_leaves=6), other=LEAVES, value=VALUES)
def test_a_full_share_is_what_jsonschema_calls_valid(dialect, schema, other, value):
    if other == {"$ref": "#/$defs/other"}:
        return  # refers to itself without end
    whole = {"allOf": [schema], "$defs": {"other": other}} | ({"$schema": dialect} if dialect else {})
    (share,) = score(whole, json.dumps(value))
    assert 0 <= share <= 1
    assert (share == 1) == jsonschema.validators.validator_for(whole)(whole).is_valid(value)


def test_what_cannot_be_compared_is_not_scored():
    deep = '{"in": ' * 5_000 + "1" + "}" * 5_000
    assert score(NODE, deep, "9" * 100_000) == [None, None]
    assert score({"multipleOf": 0.1}, "9" * 400, "1e999", "[1]") == [None, None, 1.0]
    within = '{"in": ' * (json_shape.DEPTH - 1) + "{}" + "}" * (json_shape.DEPTH - 1)
    assert score(NODE, within) == [1.0]
    assert score({"properties": {"a": {"$ref": "#/properties/a"}}}, '{"a": 1}', "{}") == [None, 1.0]  # without end


def test_time_is_bounded(monkeypatch):
    monkeypatch.setattr(json_shape, "SECONDS", 0.2)
    monkeypatch.setattr(json_shape, "CALL_SECONDS", 0.5)
    started = time.monotonic()
    assert score({"pattern": "^(a|aa)+$"}, json.dumps("a" * 80 + "!"), '"aa"') == [None, 1.0]  # 10¹⁶ ways to fail
    doubling = {f"d{i}": {"not": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2 + [False]}} for i in range(40)}
    doubling["d40"] = {"type": "null"}
    assert score({"$ref": "#/$defs/d0", "$defs": doubling}, *["1"] * 50) == [None] * 50
    objects = json.dumps([{"a": number} for number in range(10_000)])
    assert score({"uniqueItems": True}, objects) == [1.0]  # all pairs would take minutes
    assert time.monotonic() - started < 10


def test_nothing_is_fetched(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    for reference in (
        "http://127.0.0.1:9/x",
        "https://json-schema.org/draft/2020-12/schema",
        "file:///etc/passwd",
        "x#/a",
    ):
        with pytest.raises(misvo.MisvoError, match="its own parts alone"):
            JsonShape({"properties": {"a": {"$ref": reference}}})
    based = {"$id": "http://127.0.0.1:9/", "$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}}
    assert score(based, "null", "1") == [1.0, 0.0]


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ('{"type": "objekt"}', "the schema of the reward 'json' is wrong at type: 'objekt' is not valid"),
        ('{"properties": {"a": {"required": "b"}}}', "is wrong at properties/a/required"),
        ('{"a": NaN}', "is not JSON: NaN is no JSON"),
        ('{"a": 1', "is not JSON"),
        ("[1]", "an object in braces"),
        ("words", "is not JSON"),
        ('{"$schema": 3}', "an object in braces"),
        ('{"$ref": "#/$defs/no"}', "has no part '#/$defs/no'"),
        ('{"$ref": "#/x", "x": {"type": "nope"}}', "is wrong at type"),
        ('{"pattern": "("}', "the pattern '(' cannot be read"),
        ('{"not": {"pattern": "((a{999}){999}){999}"}}', "repeats too much"),
        ('{"$ref": "#/const", "const": {"pattern": "((a{999}){999}){999}"}}', "repeats too much"),
        ('{"patternProperties": {"a": true}}', "takes no schema with 'patternProperties'"),
        ('{"not": {"$schema": "http://json-schema.org/draft-07/schema#"}}', "takes no schema with '$schema' inside"),
        ('{"not": {"$id": "http://a/"}}', "takes no schema with '$id' inside"),
        ('{"not": ' * 300 + "{}" + "}" * 300, "nested too deeply"),
    ],
)
def test_bad_schemas_are_refused_at_load(schema, says):
    with pytest.raises(misvo.MisvoError, match=re.escape(says)) as caught:
        rewards.load("json:" + schema)
    assert "\n" not in str(caught.value)


def test_names_of_properties_are_no_keywords():
    schema = {"properties": {"pattern": {"type": "integer"}, "$ref": {"type": "null"}, "patternProperties": True}}
    assert score(schema, '{"pattern": 1, "$ref": null}', '{"pattern": "("}') == [1.0, 0.0]
