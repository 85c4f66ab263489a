# ruff: noqa: E501
"""What is refused as an expression of a hook, as in test_expected_errors.py."""

from __future__ import annotations

from hook_examples import HOOKS
from refusals import RefusalCase

from torch_commhook.hooks.expressions import HookExpressionError, parse_hook


class TestExpressions(RefusalCase):
    def test_wrong_expressions(self) -> None:
        """Of a module of few hooks, whose names end each message."""

        def parse(text: str) -> None:
            try:
                parse_hook(text, HOOKS)
            except HookExpressionError as error:
                assert "\n" not in str(error)
                raise

        names = {"parse": parse}
        self.assert_refused(
            names,
            """\
parse("casst(bfloat16)")
    HookExpressionError: hook 'casst(bfloat16)' names the unknown hook 'casst' (did you mean 'cast'?); a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
parse("secret()")
    HookExpressionError: hook 'secret()' names the unknown hook 'secret'; a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
parse("__import__('os').system('true')")
    HookExpressionError: hook "__import__('os').system('true')" names the unknown hook "__import__('os').system"; a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
parse("hooks.cast(bfloat16)")
    HookExpressionError: hook 'hooks.cast(bfloat16)' names the unknown hook 'hooks.cast'; a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
parse("cast(bfloat17)")
    HookExpressionError: hook 'cast(bfloat17)' has the argument 'bfloat17', which is neither a dtype nor a hook; a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
parse("cast(torch.load)")
    HookExpressionError: hook 'cast(torch.load)' has the argument 'torch.load', which is neither a dtype nor a hook; a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
parse("cast(8)")
    HookExpressionError: hook 'cast(8)' is refused by cast: TypeError: cast: dtype must be a torch.dtype
parse("cast()")
    HookExpressionError: hook 'cast()' is refused by cast: missing a required argument: 'dtype'; it is cast(dtype)
parse("blockwise(process_group=1)")
    HookExpressionError: hook 'blockwise(process_group=1)' gives blockwise a process_group, which can't be written on a command line; a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
parse("blockwise(4, (1, 2))")
    HookExpressionError: hook 'blockwise(4, (1, 2))' gives blockwise a process_group, which can't be written on a command line; a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
parse("error_feedback(blockwise(4, 'x'))")
    HookExpressionError: hook "error_feedback(blockwise(4, 'x'))" gives blockwise a process_group, which can't be written on a command line; a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
parse("cast(**{})")
    HookExpressionError: hook 'cast(**{})' must not unpack a mapping (**); a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
parse("blockwise(1 + 1)")
    HookExpressionError: hook 'blockwise(1 + 1)' must not contain '1 + 1'; a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
parse("blockwise([x for x in y])")
    HookExpressionError: hook 'blockwise([x for x in y])' must not contain '[x for x in y]'; a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
parse("cast(bfloat16")
    HookExpressionError: hook 'cast(bfloat16' is not a hook expression; a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
parse("")
    HookExpressionError: hook '' is not a hook expression; a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
parse("3")
    HookExpressionError: hook '3' is not a hook expression; a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
parse("part()")
    HookExpressionError: hook 'part()' is only a part of a hook; a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
parse("part")
    HookExpressionError: hook 'part' is only a part of a hook; a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
parse("cast(bfloat16); 1")
    HookExpressionError: hook 'cast(bfloat16); 1' is not a hook expression; a hook is one of allreduce, blockwise, cast, error_feedback, part, as in cast(bfloat16), or none, or FILE.py:NAME
""",
        )
