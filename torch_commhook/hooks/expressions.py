"""Parses hooks that are written as text: ``cast(bfloat16)``, ``none`` or ``my_hooks.py:my_hook``.

An expression is parsed, never evaluated as Python. It consists of calls of the public names of
``torch_commhook.hooks``; arguments are constants, names of dtypes, lists and tuples of these, or
further calls. A file is the user's own Python, and is run. Codecs have the same form:
``blockwise(bits=4)`` or ``none``.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from torch_commhook.wording import one_line

#: The expression for DDP without a hook.
NO_HOOK = "none"

#: Common short names of dtypes.
SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
#: Arguments of hooks that only a running program can make.
_NOT_WRITABLE = ("process_group",)
#: Hooks that need such arguments, and the expression to write instead.
_NOT_WRITABLE_HOOKS = {
    "compressed": "write the codec's own name, as in blockwise(bits=4)",
}
#: Classes that are parts of hooks.
_PARTS = ("outer_sgd",)

#: More than any hook needs. Beyond Python's own limits, errors would be of other kinds.
_MOST_CHARACTERS = 10_000
_MOST_LEVELS = 50
#: Names of numbers that no argument takes.
_NOT_FINITE = ("nan", "inf", "infinity")
#: The longest part of an expression in an error.
_MOST_SHOWN = 200


class HookExpressionError(ValueError):
    """A hook expression that cannot be parsed. The message says what is accepted, in one sentence.

    Example:
        >>> try:
        ...     parse_hook("blokwise()")
        ... except HookExpressionError as error:
        ...     print(str(error).partition(";")[0])
        hook 'blokwise()' names the unknown hook 'blokwise' (did you mean 'blockwise'?)
    """


def parse_hook(expression: str, hooks: ModuleType | None = None) -> Any:
    """Return the hook that ``expression`` describes; None for ``none``.

    An expression is parsed, not run: it is a call of a hook of the library; its arguments are
    constants, dtypes, and further calls. If it names a Python file, that file is run.

    Args:
        expression: a call such as ``cast(bfloat16)``, a bare name such as ``allreduce``, ``none``,
            or ``path/to/file.py:name`` for the object ``name`` of a Python file.
        hooks: the module with the names that may be called; None means ``torch_commhook.hooks``.

    Raises:
        TypeError: ``expression`` is not a text.
        HookExpressionError: a ValueError: the expression has another form, a name is unknown,
            the file does not run, or the arguments do not fit the hook.

    Example:
        >>> parse_hook("error_feedback(blockwise(bits=4))")
        error_feedback(blockwise(bits=4))
    """
    if not isinstance(expression, str):
        raise TypeError(f"parse_hook: expression must be a text, got {type(expression).__name__}")
    text = expression.strip()
    if text.lower() == NO_HOOK:
        return None
    if is_file_reference(text):
        return _load_from_file(text)
    if hooks is None:
        from torch_commhook import hooks as library_hooks

        hooks = library_hooks
    return _Builder(text, hooks).build()


def as_hook(hook: Any, op: str = "attach") -> Any:
    """The hook itself, or the hook of an expression; ``op`` is the function's name in errors.

    Raises:
        HookExpressionError: as :func:`parse_hook`; or the expression is ``none``.
    """
    if not isinstance(hook, str):
        return hook
    found = parse_hook(hook)
    if found is None:
        raise HookExpressionError(
            f"{op}: {hook!r} is not a hook; hooks.allreduce() is the plain mean"
        )
    return found


def parse_codec(expression: str) -> Any:
    """Return the codec that a call such as ``blockwise(bits=4)``, or a bare name, describes.

    None for ``none``. Raises as :func:`parse_hook`, for codecs.
    """
    text = expression.strip()
    if text.lower() == NO_HOOK:
        return None
    from torch_commhook import codecs

    return _Builder(text, codecs, "codec").build()


def check_hook(expression: str, hooks: ModuleType | None = None) -> None:
    """Raise HookExpressionError if :func:`parse_hook` would, without running a user's file."""
    text = expression.strip()
    if is_file_reference(text):
        path, name = _split_file_reference(text)
        _check_file_defines(text, path, name)
    else:
        parse_hook(text, hooks)


def public_names(hooks: ModuleType) -> list[str]:
    """The sorted names of ``hooks`` that an expression may call; abstract classes are left out."""
    names = getattr(hooks, "__all__", None)
    if "__dir__" in vars(hooks):  # includes codecs that were registered later
        names = dir(hooks)
    elif names is None:
        names = [name for name in vars(hooks) if not name.startswith("_")]
    found = {name: getattr(hooks, name, None) for name in names}
    return sorted(
        name
        for name, value in found.items()
        if callable(value) and not isinstance(value, ModuleType) and not inspect.isabstract(value)
    )


# ---- expressions ---------------------------------------------------------------------------------


class _Builder:
    """Makes the hook or the codec of one expression from its syntax tree."""

    def __init__(self, text: str, hooks: ModuleType, kind: str = "hook") -> None:
        self.text, self.hooks, self.kind = text, hooks, kind
        if kind == "codec":
            self.names, self.forms = sorted(hooks.CODECS), f"as in blockwise(bits=8), or {NO_HOOK}"
        else:
            self.names = public_names(hooks)
            self.forms = f"as in cast(bfloat16), or {NO_HOOK}, or FILE.py:NAME"

    def build(self) -> Any:
        if len(self.text) > _MOST_CHARACTERS:
            raise self._error(f"must have at most {_MOST_CHARACTERS} characters")
        try:
            node = ast.parse(self.text, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise self._error(f"is not a {self.kind} expression") from error
        if not isinstance(node, (ast.Name, ast.Call)):
            raise self._error(f"is not a {self.kind} expression")
        self._check_depth(node)
        # A bare name is a call without arguments.
        hook = self._call(node, [], {}) if isinstance(node, ast.Name) else self._value(node)
        if self.kind == "hook" and not callable(hook):
            raise self._error("is only a part of a hook")
        return hook

    def _check_depth(self, tree: ast.expr) -> None:
        level: list[ast.AST] = [tree]
        for _ in range(_MOST_LEVELS):
            level = [inner for node in level for inner in ast.iter_child_nodes(node)]
            if not level:
                return
        raise self._error(f"must have at most {_MOST_LEVELS} levels")

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Call):
            if any(keyword.arg is None for keyword in node.keywords):
                raise self._error("must not unpack a mapping (**)")
            names = [keyword.arg for keyword in node.keywords]
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise self._error(f"gives {twice!r} twice")
            arguments = [self._value(argument) for argument in node.args]
            keywords = {str(keyword.arg): self._value(keyword.value) for keyword in node.keywords}
            return self._call(node.func, arguments, keywords)
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            number = self._value(node.operand)
            if isinstance(number, (int, float)):
                return -number
        if isinstance(node, (ast.List, ast.Tuple)):
            items = [self._value(item) for item in node.elts]
            return items if isinstance(node, ast.List) else tuple(items)
        if isinstance(node, (ast.Name, ast.Attribute)):
            return self._dtype(node)
        raise self._error(f"must not contain {_shortened(ast.unparse(node))!r}")

    def _call(self, function: ast.expr, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        name = ast.unparse(function)
        if not isinstance(function, ast.Name) or name not in self.names:
            raise self._unknown(name)
        if name in _NOT_WRITABLE_HOOKS:
            raise self._error(
                f"names {name}, which can't be written on a command line: "
                f"{_NOT_WRITABLE_HOOKS[name]}"
            )
        hook = getattr(self.hooks, name)
        bound, misfit = _bind(hook, arguments, keywords)
        for argument in _NOT_WRITABLE:
            if bound.get(argument) is not None:
                raise self._error(
                    f"gives {name} a {argument}, which can't be written on a command line"
                )
        if misfit is not None:
            raise self._refused(f"is refused by {name}: {misfit}; it is {name}{_settings(hook)}")
        try:
            if name == "hierarchical":
                return _hierarchical(hook, arguments, keywords)
            return hook(*arguments, **keywords)
        except HookExpressionError:
            raise
        except Exception as error:
            raise self._refused(f"is refused by {name}: {one_line(error)}") from error

    def _dtype(self, node: ast.Name | ast.Attribute) -> Any:
        import torch

        name = ast.unparse(node)
        value = getattr(torch, name.removeprefix("torch."), None)
        if isinstance(value, torch.dtype):
            return value
        if name in self.names:  # a wrapper's inner hook may be a bare name too
            return self._call(node, [], {})
        if name.lower() in _NOT_FINITE:
            raise self._refused(f"has the argument {name!r}, which is not a finite number")
        meant = SHORT_DTYPES.get(name.lower())
        hint = "" if meant is None else f" (did you mean {meant!r}?)"
        raise self._error(
            f"has the argument {_shortened(name)!r}, which is neither a dtype nor a "
            f"{self.kind}{hint}"
        )

    def _unknown(self, name: str) -> HookExpressionError:
        close = difflib.get_close_matches(name, self.names, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        return self._error(f"names the unknown {self.kind} {_shortened(name)!r}{hint}")

    def _refused(self, what: str) -> HookExpressionError:
        """The error of a wrong argument, which needs no list of hooks."""
        return HookExpressionError(f"{self.kind} {_shortened(self.text)!r} {what}")

    def _error(self, what: str) -> HookExpressionError:
        no_hooks = (*_NOT_WRITABLE_HOOKS, *_PARTS)
        names = ", ".join(name for name in self.names if name not in no_hooks)
        return HookExpressionError(
            f"{self.kind} {_shortened(self.text)!r} {what}; a {self.kind} is one of {names}, "
            f"{self.forms}"
        )


def _hierarchical(
    hook: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> Any:
    """The hook from its codec's hook: ``hierarchical(blockwise())``."""
    from torch_commhook.hooks import compressed

    def codec_of(value: Any) -> Any:
        return value.codec if type(value) is compressed else value

    given = {name: codec_of(value) for name, value in keywords.items()}
    return hook(*map(codec_of, arguments), **given)


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _bind(
    function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[Mapping[str, Any], str | None]:
    """Bind arguments to a function's parameters: the arguments by parameter name, and None.

    If they do not fit: only ``keywords``, and the reason; no reason if the parameters are unknown.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return keywords, None
    try:
        return signature.bind(*arguments, **keywords).arguments, None
    except TypeError as error:
        return keywords, str(error)


def _settings(function: Callable[..., Any]) -> str:
    """A function's parameters with their defaults, without types."""
    signature = inspect.signature(function)
    plain = [
        each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()
    ]
    return str(inspect.Signature(plain))


# ---- files ---------------------------------------------------------------------------------------


def is_file_reference(text: str) -> bool:
    """Whether a hook is written as FILE.py:NAME, even if the file does not exist."""
    return ".py:" in text or text.endswith(".py")


def _split_file_reference(text: str) -> tuple[Path, str]:
    path, separator, name = text.rpartition(":")
    if not separator or not path.endswith(".py") or not name.isidentifier():
        raise HookExpressionError(
            f"hook {_shortened(text)!r} must be FILE.py:NAME, where NAME is an object of that file"
        )
    try:
        is_there = Path(path).is_file()
    except OSError as error:  # a name that is too long, or a folder without permission
        raise HookExpressionError(
            f"hook {_shortened(text)!r}: the file can't be read: {error.strerror}"
        ) from error
    if not is_there:
        raise HookExpressionError(f"hook {text!r}: there is no file {path}")
    return Path(path), name


def _load_from_file(text: str) -> Any:
    path, name = _split_file_reference(text)
    spec = importlib.util.spec_from_file_location(f"_commhook_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise HookExpressionError(f"hook {text!r}: {path} can't be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle find a class's module by name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise HookExpressionError(f"hook {text!r}: {path} raised {one_line(error)}") from error
    if not hasattr(module, name):
        raise HookExpressionError(f"hook {text!r}: {path} defines no {name}")
    hook = getattr(module, name)
    if not callable(hook):
        raise HookExpressionError(
            f"hook {text!r}: {name} must be callable, got {type(hook).__name__}"
        )
    return hook


def _check_file_defines(text: str, path: Path, name: str) -> None:
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError) as error:
        raise HookExpressionError(f"{path} can't be read as Python: {one_line(error)}") from error
    bound: set[str] = set()
    coroutine_functions: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.AsyncFunctionDef) and not node.decorator_list:
            coroutine_functions.add(node.name)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            bound.update(alias.asname or alias.name.split(".")[0] for alias in node.names)
            if any(alias.name == "*" for alias in node.names):
                return  # it may come from there; the error appears when the file runs
    if name in bound:
        return
    if name in coroutine_functions:
        raise HookExpressionError(
            f"hook {text!r} must return a Future or a tensor, got a coroutine function "
            "(async def), which nothing would await"
        )
    raise HookExpressionError(f"{path} defines no {name}")
