"""What an exported program computes from its weights alone is computed once, before it is written.

A norm-free network standardizes the weights of each convolution in every forward pass, by a batch
norm in training mode. Written out as it is, nf_resnet26 in ONNX is 28 of those, 85 means and 57
reshapes beside its 29 convolutions; folded, it is convolutions. Other networks have the like:
tables of relative positions, for one.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx


@torch.no_grad()
def fold_constants(module: fx.GraphModule) -> fx.GraphModule:
    """The same function, in place: weights that are not used any more are gone."""
    values = _constant_values(module)
    graph = module.graph
    weights = {id(value): node for node, value in values.items() if node.op == "get_attr"}
    for node, value in values.items():
        if value is None and not node.users:  # an assertion about a weight, which has held
            graph.erase_node(node)
        if node.op == "get_attr" or not isinstance(value, Tensor):
            continue
        if all(user in values for user in node.users):
            continue
        # A cast to the dtype that it has gives the weight itself, which keeps its name.
        if (folded := weights.get(id(value))) is None:
            name = f"folded_{len(weights)}"
            module.register_buffer(name, value)
            with graph.inserting_before(node):
                folded = weights[id(value)] = graph.get_attr(name)
        node.replace_all_uses_with(folded)
    graph.eliminate_dead_code()
    module.recompile()
    _delete_unused(module)
    return module


def _constant_values(module: fx.GraphModule) -> dict[fx.Node, Any]:
    """The weights, and what follows from them without the images. Nothing, where such a value is
    changed in place: it would be changed again by every call."""
    values: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "get_attr":
            values[node] = attrgetter(node.target)(module)
        elif node.op == "call_function" and inputs:
            schema = getattr(node.target, "_schema", None)
            if schema is not None and schema.is_mutable:
                if any(source in values for source in inputs):
                    return {}
            elif all(source in values for source in inputs):
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
    return values


def _delete_unused(module: fx.GraphModule) -> None:
    """An export takes along every weight that a module has, used or not."""
    used = {node.target for node in module.graph.nodes if node.op == "get_attr"}
    named = [*module.named_parameters(), *module.named_buffers()]
    for name in [name for name, _ in named if name not in used]:
        owner, _, attribute = name.rpartition(".")
        delattr(module.get_submodule(owner), attribute)
