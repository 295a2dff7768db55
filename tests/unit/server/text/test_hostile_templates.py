"""A chat template reaches its messages alone: no class, no function's globals, no file, no process (design: S8)."""

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import jinja2
import pytest

from server.text.limited_templates import render

ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__']['__mro__'][1]['__subclasses__']() }}",
    "{{ ''|attr('__class__')|attr('__mro__')|list }}",
    r"{{ ''|attr('\x5f\x5fclass\x5f\x5f')|attr('\x5f\x5fbase\x5f\x5f') }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
    "{{ joiner.__init__.__globals__['os'].system('touch MARK') }}",
    "{{ namespace.__init__.__globals__.os.system('touch MARK') }}",
    "{{ lipsum.__globals__['os'].system('touch MARK') }}",
    "{{ lipsum|attr('__globals__')|attr('__getitem__')('os')|attr('system')('touch MARK') }}",
    "{{ range.__class__.__base__.__subclasses__() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ raise_exception.__code__.co_consts }}",
    "{{ strftime_now.__globals__['__builtins__'] }}",
    "{{ strftime_now.__closure__ }}",
    "{{ messages.__class__ }}",
    "{{ messages.__reduce_ex__(2) }}",
    "{{ messages[0].content.__class__ }}",
    "{{ '{0.__class__.__mro__[1]}'.format('') }}",
    "{{ '{x.__class__}'.format(x=1) }}",
    "{{ ('{0.__cla' ~ 'ss__.__mro__[1]}').format('') }}",
    "{{ '%s'.__mod__(messages) }}",
    "{% set f = ''.__getattribute__ %}{{ f('__class__') }}",
    "{% set x = messages.append('a') %}{{ messages }}",
    "{% set x = messages[0].update({'content': 'another'}) %}{{ messages }}",
    "{% set x = messages.clear() %}{{ messages }}",
    "{{ messages|map(attribute='__class__')|list }}",
    "{{ [messages]|map(attribute='__class__.__mro__')|list }}",
    "{{ ([messages]|groupby('__class__')|list)[0][0] }}",
    "{{ [messages]|map('attr', '__class__')|list }}",
    "{% include 'secret' %}",
    "{% import 'secret' as names %}{{ names }}",
    "{% extends 'secret' %}",
    "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "{% macro m() %}{% endmacro %}{{ m.__class__.__init__.__globals__ }}",
)
TOLD = re.compile(r"<class|<function|<slot|<built-in|built-in|__builtins__|Context|os\.|SECRET|another|\ba\b")


def outcome(template: str, folder: Path, *, is_ours: bool) -> str | None:
    """What a template got at that it should not have: a text, "MARK" for a process, "messages"; None: nothing."""
    mark = folder / "MARK"
    source = template.replace("touch MARK", f"touch {mark}")
    (folder / "secret").write_text("SECRET")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    before = deepcopy(messages)
    try:
        if is_ours:
            text = render(source, 5, 2**20, {"messages": messages})
        else:
            known = {"raise_exception": outcome, "strftime_now": outcome}
            text = (
                jinja2.Environment(loader=jinja2.FileSystemLoader(folder))
                .from_string(source)
                .render(messages=messages, **known)
            )
    except (jinja2.TemplateError, TypeError):  # the latter: there is no loader
        text = ""
    if mark.exists():
        mark.unlink()
        return "MARK"
    if messages != before:
        return "messages"
    found = TOLD.search(text)
    return None if found is None else found[0]


@pytest.mark.parametrize("template", ESCAPES)
def test_nothing_is_reached_but_messages(template: str, tmp_path: Path) -> None:
    assert outcome(template, tmp_path, is_ours=True) is None


def test_most_of_these_reach_something_where_templates_are_not_confined(tmp_path: Path) -> None:
    reached = {template for template in ESCAPES if outcome(template, tmp_path, is_ours=False) is not None}
    assert len(reached) > 0.8 * len(ESCAPES), sorted(set(ESCAPES) - reached)
