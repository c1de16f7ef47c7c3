"""What a chat template cannot do."""

from __future__ import annotations

import pytest

from steppe.errors import ChatTemplateError
from steppe.text.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "hi"}]


def render(source: str, limit: int = 10_000) -> str:
    return ChatTemplate(source, max_output_chars=limit).render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ self._TemplateReference__context.environment.globals.clear() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% include 'x' %}",
        "{% import 'os' as os %}",
    ],
)
def test_escapes_fail(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="chat template failed"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}xxxxxxxxxx{% endfor %}",
        "{{ 'x' * 99999999999 }}",
        "{{ 99999999999 * [1] }}",
        "{{ 2 ** 99999999999 }}",
        "{% for i in range(10 ** 12) %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    ],
)
def test_waste_is_bounded(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        render(source)


@pytest.mark.parametrize("source", ["{% if %}", "{{ 'a' ", "{% endfor %}", "{% nonsense %}"])
def test_what_does_not_compile_says_so(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="does not compile"):
        render(source)


@pytest.mark.parametrize(
    "source",
    ["{{ 1 / 0 }}", "{{ nothing.at.all }}", "{{ 'a' + 1 }}", "{{ messages[0].content.no() }}"],
)
def test_failures_are_chat_template_errors(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="failed: "):
        render(source)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "{{ {'b': 'é<>&', 'a': [1, none, true]} | tojson }}",
            '{"b": "é<>&", "a": [1, null, true]}',
        ),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=True) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("a{% generation %}b{% endgeneration %}c", "abc"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{{ 'ab' * 2 }}{{ 2 ** 10 }}{{ 3 * 4 }}{{ 2 ** -1 }}{{ 1.5 ** 2 }}", "abab1024120.52.25"),
        ("{{ messages[0].content.upper() }}", "HI"),
        ("{% set ns = namespace(a=1) %}{% set ns.a = 2 %}{{ ns.a }}", "2"),
    ],
)
def test_what_templates_rely_on(source: str, expected: str) -> None:
    assert render(source) == expected
