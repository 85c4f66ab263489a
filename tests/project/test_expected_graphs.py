"""What compiled autograd makes of hooks: the collectives and operators of the graph, in order.

``EXPECTTEST_ACCEPT=1`` writes the new text into this file.
"""

from __future__ import annotations

import expecttest
import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch._dynamo.backends.common import aot_autograd

from torch_commhook import attach, hooks


def captured(hook: hooks.Hook) -> str:
    """The targets of ours and of c10d in each graph of three backward passes.

    Without overloads, and through what makes a mutating operator functional. Graphs that are alike
    stand there once.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    handle = attach(model, hook)
    graphs: list[list[str]] = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append([_target(node) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    backend = aot_autograd(fw_compiler=compiler)
    with compiled_autograd._enable(torch.compile(backend=backend, fullgraph=True)):
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
    handle.remove()
    numbers: dict[str, list[str]] = {}
    for number, targets in enumerate(graphs):
        ours = [f"    {each}\n" for each in targets if each.startswith(("commhook", "_c10d"))]
        numbers.setdefault("".join(ours), []).append(str(number))
    return "".join(f"graph {', '.join(each)}\n{text}" for text, each in numbers.items())


def _target(node: torch.fx.Node) -> str:
    target = node.target
    if "auto_functionalized" in str(target):
        target = node.args[0]
    return str(target).removesuffix(".default")


@pytest.mark.usefixtures("one_rank", "fresh_compiler")
class TestGraphs(expecttest.TestCase):
    def test_cast(self) -> None:
        self.assertExpectedInline(
            captured(hooks.cast()),
            """\
graph 0, 1
    commhook.flatten
    commhook.unflatten_into
""",
        )

    def test_error_feedback_of_blockwise(self) -> None:
        self.assertExpectedInline(
            captured(hooks.error_feedback(hooks.blockwise())),
            """\
graph 0, 1
    commhook.blockwise_encode
    commhook.start_all_to_all
    _c10d_functional.wait_tensor
    commhook.blockwise_reduce
    commhook.start_all_gather
    _c10d_functional.wait_tensor
    commhook.blockwise_decode
    commhook.unflatten_into
    commhook.count_step
""",
        )
