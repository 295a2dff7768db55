"""Chat templates as transformers compiles them, but for their time and memory: a template has no end of its own that
anybody could check before. Must not know messages or tokens."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from jinja2 import Environment, Template, TemplateRuntimeError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

LEAST_CHARACTERS = 2**20  # of one text, or values of one list, that any template may put together
MOST_DIGITS = 4096  # binary ones of a power


class RenderingTooLongError(Exception):
    """A template that did not end within its seconds."""


class TemplateSourceError(Exception):
    """What is no Jinja template, in words: with its line where that is known."""


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """`with environment.limits(2, 10_000): template.render(...)`. The seconds are those of this thread's CPU, so that a
    busy machine refuses nobody; they are looked at in every round of a loop and at every call. No text, or list, that
    operators put together has more than those characters, or values. That holds for templates as people write them by
    mistake, and not for those made to do harm: filters are neither timed nor measured (`select` in a long list, `join`,
    `slice`), nor are compiling, `%` and what blocks and macros give. A model's files are its operator's to trust."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self, model: Environment) -> None:
        """As `model`, whose extensions, filters and functions it has."""
        extensions = [type(extension) for extension in model.extensions.values()]
        super().__init__(trim_blocks=model.trim_blocks, lstrip_blocks=model.lstrip_blocks, extensions=extensions)
        self.filters.update(model.filters)
        self.tests.update(model.tests)
        self.globals.update(model.globals)
        self._limits = threading.local()

    @contextmanager
    def limits(self, seconds: float, characters: int) -> Iterator[None]:
        """Raises RenderingTooLongError, TemplateRuntimeError from what is rendered inside. Not to be nested."""
        self._limits.end, self._limits.characters = time.thread_time() + seconds, characters
        try:
            yield
        finally:
            del self._limits.end, self._limits.characters

    @property
    def goes_on(self) -> bool:
        """True. What a template is given to read in every round."""
        self._check_time()
        return True

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as in jinja2
        """All that a template calls comes here: its macros and those of `loop`, methods of texts."""
        __self._check_time()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, str) and isinstance(right, str):  # nearly always
            self._check_characters(len(left) + len(right))
            return left + right
        self._check_size(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def joined(self, *parts: Any) -> str:
        """What `~` gives."""
        texts = [str(part) for part in parts]
        self._check_characters(sum(map(len, texts)))
        return "".join(texts)

    def _check_time(self) -> None:
        if time.thread_time() > self._limits.end:
            raise RenderingTooLongError

    def _check_size(self, operator: str, left: Any, right: Any) -> None:
        if operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MOST_DIGITS:
                raise TemplateRuntimeError("it computes a number that is too large")
            return
        lengths = [len(one) for one in (left, right) if isinstance(one, str | list | tuple)]
        if operator == "+":
            self._check_characters(sum(lengths))
        elif lengths:
            times = next((one for one in (left, right) if isinstance(one, int)), 1)
            self._check_characters(lengths[0] * times)

    def _check_characters(self, count: int) -> None:
        if count > self._limits.characters:
            raise TemplateRuntimeError(f"it puts together more than {self._limits.characters} characters")

    def limited(self, source: str) -> Template:
        """Raises jinja2.TemplateSyntaxError."""
        tree = self.parse(source)
        for loop in list(tree.find_all(nodes.For)):
            line, look = loop.lineno, nodes.EnvironmentAttribute("goes_on", lineno=loop.lineno)
            loop.body.insert(0, nodes.ExprStmt(look, lineno=line))
            if loop.test is not None:  # the rounds that it leaves out have no body
                loop.test = nodes.And(look, loop.test, lineno=line)
        _replace_joins(tree)
        tree.set_environment(self)
        return Template.from_code(self, self.compile(tree), self.make_globals(None))


class _Generation(Extension):
    """transformers' tag around what an assistant says."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def check_source(source: str) -> None:
    """Whether `compiled` will take it, without transformers, which takes a second to import. Raises
    TemplateSourceError."""
    syntax = Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
    try:
        LimitedEnvironment(syntax).limited(source)
    except TemplateSyntaxError as error:
        raise TemplateSourceError(f"line {error.lineno}: {error.message}") from error
    except (SyntaxError, RecursionError, MemoryError) as error:  # of the Python that is made of it
        raise TemplateSourceError(f"it is nested too deeply ({error})") from error


@lru_cache(maxsize=8)
def compiled(source: str) -> Template:
    """Its environment is a LimitedEnvironment. Raises jinja2.TemplateSyntaxError."""
    from transformers.utils.chat_template_utils import _compile_jinja_template  # a second, while the engine could start

    theirs = _compile_jinja_template("").environment  # not of `source`: it would be computed as far as it is constant
    return LimitedEnvironment(theirs).limited(source)


def names_read(source: str) -> set[str]:
    """The variables that a template looks at. Raises jinja2.TemplateSyntaxError."""
    return find_undeclared_variables(compiled(source).environment.parse(source))


def render(source: str, seconds: float, characters: int, variables: Mapping[str, Any]) -> str:
    """Within these limits. Raises RenderingTooLongError, jinja2.TemplateError, and whatever the template's expressions
    do."""
    template = compiled(source)
    environment = template.environment
    assert isinstance(environment, LimitedEnvironment)
    with environment.limits(seconds, characters):
        return template.render(variables)


def _replace_joins(node: nodes.Node) -> None:
    """Every `~` by a call of `joined`."""
    for field, value in node.iter_fields():
        if isinstance(value, list):
            value[:] = map(_without_join, value)
        else:
            setattr(node, field, _without_join(value))


def _without_join(value: Any) -> Any:
    if not isinstance(value, nodes.Node):
        return value
    _replace_joins(value)
    if not isinstance(value, nodes.Concat):
        return value
    joined = nodes.EnvironmentAttribute("joined", lineno=value.lineno)
    return nodes.Call(joined, value.nodes, [], None, None, lineno=value.lineno)
