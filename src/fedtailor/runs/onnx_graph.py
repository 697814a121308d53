"""A model as an ONNX graph that takes the raw columns of a table (or arrays) and gives probabilities or numbers.

Inputs are named after the columns and have shape [rows, 1]: numbers as double with NaN where missing (truth values as 0 and 1,
dates as days since 1970), words as strings with "" where missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedtailor import models as networks
from fedtailor.algorithms import origin
from fedtailor.data.schema import MISSING, OTHER, Column
from fedtailor.errors import InvalidArgument, ModelMismatch
from fedtailor.models.cnn import Image
from fedtailor.models.linear import Linear
from fedtailor.runs.models import Saved
from fedtailor.runs.portable import columns_as_scaled, metadata_of

OPSET, ML_OPSET, IR = 17, 3, 8  # of 2022: what most runtimes read
FAMILIES = "linear, mlp, cnn2, cnn3 and cnn5"
CHECKED = 64  # rows
CLOSE = 1e-5
PROBABILITIES, PREDICTION, ROWS = "probabilities", "prediction", "x"


class Graph:
    """Nodes and constants as they are added; every value has a name of its own that no column can have."""

    def __init__(self) -> None:
        self.helper: Any = _onnx().helper
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def add(self, op: str, *inputs: str, to: str | None = None, domain: str = "", **attributes: Any) -> str:
        out = to or f"fedtailor/{len(self.nodes)} {op}"
        self.nodes.append(self.helper.make_node(op, list(inputs), [out], domain=domain, **attributes))
        return out

    def constant(self, value: Any) -> str:
        name = f"fedtailor/constant {len(self.constants)}"
        self.constants.append(_onnx().numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def cast(self, value: str, dtype: Any) -> str:
        out = f"fedtailor/{len(self.nodes)} Cast"
        kind = self.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        self.nodes.append(self.helper.make_node("Cast", [value], [out], to=kind))
        return out


def onnx_of(saved: Saved, client: str | None) -> bytes:
    """Return a client's model, or the shared one, as the bytes of an ONNX file; models that are not translated are refused."""
    onnx, graph = _onnx(), Graph()
    network = _network(saved)
    weights = {name: value.numpy() for name, value in saved.weights(client).items()}
    if saved.schema is None:
        float_kind = graph.helper.np_dtype_to_tensor_dtype(np.dtype(saved.facts["dtype"]))
        inputs = [graph.helper.make_tensor_value_info(ROWS, float_kind, ["rows", *saved.facts["shape"]])]
        rows = ROWS
    else:
        columns = columns_as_scaled(saved.schema, client)
        inputs = [_input(graph, column) for column in columns]
        features = [feature for column in columns for feature in _features(graph, column, saved.schema.marks)]
        rows = graph.add("Concat", *features, axis=1)
        rows = graph.cast(rows, saved.facts["dtype"])
    logits = _layers(graph, network, weights, rows)
    outputs = _outputs(graph, saved, logits)
    made = graph.helper.make_graph(graph.nodes, "fedtailor", inputs, outputs, graph.constants)
    versions = [graph.helper.make_opsetid("", OPSET), graph.helper.make_opsetid("ai.onnx.ml", ML_OPSET)]
    model = graph.helper.make_model(made, opset_imports=versions, ir_version=IR, producer_name="fedtailor")
    graph.helper.set_model_props(model, metadata_of(saved, client))
    onnx.checker.check_model(model)
    return model.SerializeToString()


def check(data: bytes, saved: Saved, client: str | None) -> float | None:
    """Return the largest difference between the file's answers and our own on made-up rows, refused where it is more than 1e-5;
    None where onnxruntime is not installed."""
    try:
        import onnxruntime
    except ImportError:
        return None
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    draw = np.random.default_rng(0)
    if saved.schema is None:
        features: Any = draw.uniform(size=(CHECKED, *saved.facts["shape"])).astype(saved.facts["dtype"])
        feeds = {ROWS: features}
    else:
        feeds = {column.name: _example(column, draw) for column in saved.schema.columns}
        features = saved.schema.encode(_frame(saved.schema.columns, feeds), client)
    answers = dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))
    kind = saved.task.kind
    ours = kind.soft(saved.predict(client, features)).double().numpy()
    if kind.least_squares:
        ours = ours.reshape(CHECKED, -1) if saved.schema is None else saved.schema.restore(ours.reshape(CHECKED, -1))
    theirs = answers[PREDICTION if kind.least_squares else PROBABILITIES].reshape(ours.shape)
    apart = float(np.abs(theirs - ours).max() / max(1.0, np.abs(ours).max()))
    if not apart <= CLOSE:
        raise ModelMismatch(f"the ONNX file is {apart:.1g} off the run's own predictions, so it is not written; report this")
    return apart


def _onnx() -> Any:
    try:
        import onnx
        import onnx.numpy_helper
    except ImportError as error:
        raise InvalidArgument("writing ONNX needs onnx; install fedtailor[onnx]") from error
    return onnx


def _network(saved: Saved) -> nn.Module:
    """Return the network's layers, without memory for its weights."""
    facts, name = saved.facts, saved.facts["model"]
    if saved.tokens or origin.is_spec(name):
        raise ModelMismatch(f"the model {name!r} is not written as ONNX; {FAMILIES} are. Export it without --onnx")
    with torch.device("meta"):
        return networks.build(name, tuple(facts["shape"]), facts["outputs"], seed=facts["seed"], bias=facts["bias"])


def _layers(graph: Graph, network: nn.Module, weights: dict[str, NDArray[Any]], rows: str) -> str:
    chain = network.named_children() if isinstance(network, nn.Sequential) else [("", network)]
    for name, layer in chain:
        if type(layer) not in LAYERS:
            raise ModelMismatch(f"a layer of the kind {type(layer).__name__} is not written as ONNX; models with {FAMILIES} are")
        own = {part: weights[f"{name}.{part}".lstrip(".")] for part, _ in layer.named_parameters()}
        rows = LAYERS[type(layer)](graph, layer, own, rows)
    return rows


def _linear(graph: Graph, layer: Any, own: dict[str, NDArray[Any]], x: str) -> str:
    flat = graph.add("Flatten", x, axis=1)
    return graph.add("Gemm", flat, *(graph.constant(own[part]) for part in ("weight", "bias") if part in own), transB=1)


def _convolution(graph: Graph, layer: Any, own: dict[str, NDArray[Any]], x: str) -> str:
    both = {"kernel_shape": layer.kernel_size, "strides": layer.stride, "pads": [*layer.padding, *layer.padding]}
    return graph.add("Conv", x, *(graph.constant(own[part]) for part in ("weight", "bias") if part in own), **both)


def _pool(graph: Graph, layer: Any, own: dict[str, NDArray[Any]], x: str) -> str:
    size, step = [layer.kernel_size] * 2, [layer.stride] * 2
    return graph.add("MaxPool", x, kernel_shape=size, strides=step, ceil_mode=int(layer.ceil_mode))


LAYERS: dict[type, Callable[[Graph, Any, dict[str, NDArray[Any]], str], str]] = {
    Linear: _linear,
    nn.Linear: _linear,
    nn.Flatten: lambda graph, layer, own, x: graph.add("Flatten", x, axis=1),
    nn.ReLU: lambda graph, layer, own, x: graph.add("Relu", x),
    nn.Conv2d: _convolution,
    nn.MaxPool2d: _pool,
    Image: lambda graph, layer, own, x: graph.add("Reshape", x, graph.constant(np.array([-1, *layer.shape], np.int64))),
}


def _input(graph: Graph, column: Column) -> Any:
    kind = _onnx().TensorProto.STRING if column.kind == "category" else _onnx().TensorProto.DOUBLE
    return graph.helper.make_tensor_value_info(column.name, kind, ["rows", 1])


def _features(graph: Graph, column: Column, marks: Sequence[str]) -> list[str]:
    """Return the features of a column, as ``Column.write`` makes them: computed in double, kept in single precision."""
    if column.kind == "category":
        place = {category: i for i, category in enumerate(column.categories)}
        keys = {**dict.fromkeys(("", *marks), place.get(MISSING, -1)), **place}
        code = graph.add(
            "LabelEncoder",
            column.name,
            domain="ai.onnx.ml",
            keys_strings=list(keys),
            values_int64s=list(keys.values()),
            default_int64=place.get(OTHER, -1),
        )
        return [graph.cast(graph.add("Equal", code, graph.constant(np.arange(len(place))[None])), np.float32)]
    double = np.float64
    value = graph.add("Sub", column.name, graph.constant(double(column.origin))) if column.origin else column.name
    gap = graph.add("IsNaN", value)
    value = graph.add("Where", gap, graph.constant(double(column.fill)), value)
    value = graph.add("Sub", value, graph.constant(double(column.mean)))
    value = graph.cast(graph.add("Div", value, graph.constant(double(column.scale))), np.float32)
    return [value, graph.cast(gap, np.float32)] if column.has_indicator else [value]


def _outputs(graph: Graph, saved: Saved, logits: str) -> list[Any]:
    """Add what is made of the logits, and return the outputs."""
    kind, facts, proto = saved.task.kind, saved.facts, _onnx().TensorProto
    width = ["rows", facts["outputs"]]
    if kind.least_squares:
        mean, scale = (0.0, 1.0) if saved.schema is None else (saved.schema.label_mean, saved.schema.label_scale)
        value = graph.add("Mul", graph.cast(logits, np.float64), graph.constant(np.float64(scale)))
        graph.add("Add", value, graph.constant(np.float64(mean)), to=PREDICTION)
        return [graph.helper.make_tensor_value_info(PREDICTION, proto.DOUBLE, width)]
    float_kind = graph.helper.np_dtype_to_tensor_dtype(np.dtype(facts["dtype"]))
    out = [graph.helper.make_tensor_value_info(PROBABILITIES, float_kind, width)]
    if not kind.softmax:
        graph.add("Sigmoid", logits, to=PROBABILITIES)
        return out
    graph.add("Softmax", logits, to=PROBABILITIES, axis=1)
    if (cut := facts.get("threshold")) is not None:  # p >= cut where the log odds reach those of cut
        shift = np.array([[0.0, np.log((1 - cut) / cut)]], facts["dtype"])
        logits = graph.add("Add", logits, graph.constant(shift))
    best = graph.add("ArgMax", logits, axis=1, keepdims=0)
    names = facts["classes"] or [str(i) for i in range(facts["outputs"])]
    classes = {"keys_int64s": list(range(len(names))), "values_strings": list(names)}
    graph.add("LabelEncoder", best, to=PREDICTION, domain="ai.onnx.ml", default_string=names[0], **classes)
    return [*out, graph.helper.make_tensor_value_info(PREDICTION, proto.STRING, ["rows"])]


def _example(column: Column, draw: np.random.Generator) -> NDArray[Any]:
    """Return values of a column to check with, of which some are missing and some words unknown."""
    if column.kind == "category":
        known = [category for category in column.categories if category not in (MISSING, OTHER)]
        return draw.choice(np.array([*known, "", "a word that no row had"], object), (CHECKED, 1))
    values = draw.integers(0, 2, (CHECKED, 1)) + 0.0
    if column.kind != "bool":
        values = column.origin + column.mean + column.scale * draw.normal(size=(CHECKED, 1))
    if column.kind == "date":
        values = np.floor(values)
    values[draw.random((CHECKED, 1)) < 0.1] = np.nan
    return values


def _frame(columns: Any, feeds: dict[str, NDArray[Any]]) -> Any:
    import pandas as pd

    frame = {column.name: pd.Series(feeds[column.name][:, 0]) for column in columns}
    dates = [column.name for column in columns if column.kind == "date"]
    return pd.DataFrame(frame | {name: pd.to_datetime(frame[name], unit="D") for name in dates})
