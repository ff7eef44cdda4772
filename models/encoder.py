"""Builds a BERT-style encoder as an ONNX model, with fused or with plain operators, from the same weights.

Inputs `input_ids` and `attention_mask`, INT64 [batch, sequence]; output `embedding` [batch, hidden] in the spec's dtype
([batch, sequence, hidden] without pooling). No Shape node, no control flow and no copy to the host: positions come
from the data's own shape on the device, so that a CUDA or WebGPU graph can be captured once the dimensions are known.

Positions with mask 0 add nothing to the others: their attention weight is exp(-10000) = 0, their pooling weight 0.
A row whose mask is all 0 gives a zero row under mean pooling, never NaN. The embedding look-up is a Gather in the fused
build too: its CUDA kernel checks ids against the table, which EmbedLayerNormalization's does not, and WebGPU has it.
A sequence longer than `max_positions` is the caller's to refuse (the largest bucket does).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from models.encoder_spec import TINY, Array, EncoderSpec, ModelBuildError, Weights, check_weights, random_weights
from models.graph import CONTRIB_DOMAIN, GraphWriter

__all__ = ["TINY", "EncoderSpec", "ModelBuildError", "build", "build_encoder"]

MASKED_SCORE = -10000.0  # representable in fp16; exp() of it is exactly 0 in fp32


def build(spec: EncoderSpec, seed: int) -> onnx.ModelProto:
    """An encoder with random weights. The same spec and seed give the same model; fused or not, the same weights."""
    return build_encoder(spec, random_weights(spec, seed))


def build_encoder(spec: EncoderSpec, weights: Weights) -> onnx.ModelProto:
    """An encoder with the given weights, named as in BERT checkpoints. Raises ModelBuildError where they do not fit."""
    check_weights(spec, weights)
    return _EncoderWriter(spec, weights).write()


class _EncoderWriter:
    def __init__(self, spec: EncoderSpec, weights: Weights) -> None:
        self.spec = spec
        self.weights = weights
        self.graph = GraphWriter()
        self.float_type = TensorProto.FLOAT16 if spec.dtype == "fp16" else TensorProto.FLOAT

    def write(self) -> onnx.ModelProto:
        spec, graph = self.spec, self.graph
        mask = graph.add("Cast", "attention_mask", name="mask", to=TensorProto.FLOAT)
        attention_bias = self.attention_bias(mask)
        states = self.embed(mask)
        for layer in range(spec.layers):
            states = self.layer(layer, states, attention_bias)
        states = self.pool(states, mask)
        if spec.normalise:
            states = self.normalise(states)
        graph.add("Identity", states, name="embedding")
        names = ("input_ids", "attention_mask")
        inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "sequence"]) for name in names]
        rows = ["batch", "sequence"] if spec.pooling == "none" else ["batch"]
        output = helper.make_tensor_value_info("embedding", self.float_type, [*rows, spec.hidden])
        return graph.model("encoder", inputs, [output])

    # Constants

    def weight(self, name: str, array: Array | None = None) -> str:
        array = self.weights[name] if array is None else array
        return self.graph.constant(name, array.astype(self.spec.numpy_dtype))

    def dense(self, name: str) -> str:
        """A checkpoint's dense weight is [out, in]; MatMul wants [in, out]."""
        return self.weight(f"{name}.weight", self.weights[f"{name}.weight"].T)

    def contrib(self, op_type: str, *inputs: str, name: str, **attributes: Any) -> str:
        return self.graph.add(op_type, *inputs, name=name, domain=CONTRIB_DOMAIN, **attributes)

    def linear(self, name: str, states: str) -> str:
        product = self.graph.add("MatMul", states, self.dense(name), name=f"{name}.product")
        return self.graph.add("Add", product, self.weight(f"{name}.bias"), name=name)

    def to_model_type(self, value: str, name: str) -> str:
        return self.graph.add("Cast", value, name=name, to=self.float_type)

    def scalar(self, name: str, value: float) -> str:
        return self.graph.constant(name, value, dtype=self.spec.numpy_dtype)

    # Parts of the encoder

    def attention_bias(self, mask: str) -> str:
        """0 where a key may be seen, MASKED_SCORE where not: [batch, 1, 1 or (fused) sequence, sequence]."""
        graph = self.graph
        if not self.spec.fused:
            row = self.to_model_type(mask, "mask_typed")
            for axis in (1, 2):
                row = graph.add("Unsqueeze", row, graph.constant(f"axes_{axis}", [axis], np.int64), name=f"mask_{axis}")
            row = graph.add("Sub", self.scalar("one_typed", 1.0), row, name="masked")
            return graph.add("Mul", row, self.scalar("masked_score", MASKED_SCORE), name="attention_bias")
        row = graph.add("Sub", mask, graph.constant("one", 1.0, np.float32), name="mask_minus_one")
        row = graph.add("Mul", row, graph.constant("-masked_score", -MASKED_SCORE, np.float32), name="bias_row_f32")
        row = self.to_model_type(row, "bias_row")
        row = graph.add("Unsqueeze", row, graph.constant("axes_1_2", [1, 2], np.int64), name="bias_row_4d")
        column = graph.add("Mul", mask, graph.constant("zero", 0.0, np.float32), name="bias_column_f32")
        column = self.to_model_type(column, "bias_column")
        column = graph.add("Unsqueeze", column, graph.constant("axes_1_3", [1, 3], np.int64), name="bias_column_4d")
        return graph.add("Add", row, column, name="attention_bias")

    def position_ids(self, mask: str) -> str:
        """0, 1, 2 ... as INT32 [1, sequence], no higher than the table: a running sum of ones of the mask's length."""
        graph = self.graph
        zero, one = graph.constant("zero", 0.0, np.float32), graph.constant("one", 1.0, np.float32)
        last = graph.constant("last_position", self.spec.max_positions - 1, np.float32)
        bounds = [graph.constant(name, [int(name[-1])], np.int64) for name in ("from_0", "to_1", "axis_0")]
        ids = graph.add("Slice", mask, *bounds, name="mask_of_first_row")
        ids = graph.add("Clip", ids, one, one, name="ones")
        ids = graph.add("CumSum", ids, graph.constant("axis_1_scalar", 1, np.int64), name="positions_f32", exclusive=1)
        ids = graph.add("Clip", ids, zero, last, name="clamped_positions")
        return graph.add("Cast", ids, name="position_ids", to=TensorProto.INT32)

    def embed(self, mask: str) -> str:
        """Word + position + token type (always type 0, so it is folded into the positions), then layer norm."""
        graph, epsilon = self.graph, self.spec.layer_norm_epsilon
        words = self.weight("embeddings.word_embeddings.weight")
        table = self.weights["embeddings.position_embeddings.weight"]
        table = table + self.weights["embeddings.token_type_embeddings.weight"][0]
        table_name = self.weight("embeddings.position_and_type", table)
        norm = [self.weight(f"embeddings.LayerNorm.{name}") for name in ("weight", "bias")]
        positions = self.position_ids(mask)
        ids = graph.add("Cast", "input_ids", name="ids", to=TensorProto.INT32)
        word_rows = graph.add("Gather", words, ids, name="word_rows", axis=0)
        position_rows = graph.add("Gather", table_name, positions, name="position_rows", axis=0)
        states = graph.add("Add", word_rows, position_rows, name="embedding_sum")
        return graph.add("LayerNormalization", states, *norm, name="states", axis=-1, epsilon=epsilon)

    def layer(self, index: int, states: str, bias: str) -> str:
        prefix = f"encoder.layer.{index}."
        attention = self.fused_attention if self.spec.fused else self.plain_attention
        context = attention(f"{prefix}attention.self", states, bias)
        states = self.dense_and_norm(f"{prefix}attention.output", context, states)
        wide = self.gelu(f"{prefix}intermediate.dense", states)
        return self.dense_and_norm(f"{prefix}output", wide, states)

    def fused_attention(self, prefix: str, states: str, bias: str) -> str:
        """One product for query, key and value; softmax and context in one operator.

        The mask goes in as an attention bias: a 2-D mask would keep CUDA from its memory-efficient kernel, and lengths
        would allow no holes. That kernel takes multiples of 8 (fp16) or 16 (fp32) tokens.
        """
        names = [f"{prefix}.{name}" for name in ("query", "key", "value")]
        weight = np.concatenate([self.weights[f"{name}.weight"].T for name in names], axis=1)
        offset = np.concatenate([self.weights[f"{name}.bias"] for name in names])
        inputs = (states, self.weight(f"{prefix}.qkv.weight", weight), self.weight(f"{prefix}.qkv.bias", offset))
        return self.contrib("Attention", *inputs, "", "", bias, name=prefix, num_heads=self.spec.heads)

    def plain_attention(self, prefix: str, states: str, bias: str) -> str:
        graph, spec = self.graph, self.spec
        split = graph.constant("split_heads", [0, 0, spec.heads, spec.head_size], np.int64)
        heads = []
        for name, order in (("query", [0, 2, 1, 3]), ("key", [0, 2, 3, 1]), ("value", [0, 2, 1, 3])):
            rows = self.linear(f"{prefix}.{name}", states)
            rows = graph.add("Reshape", rows, split, name=f"{prefix}.{name}.split")
            heads.append(graph.add("Transpose", rows, name=f"{prefix}.{name}.heads", perm=order))
        query, key, value = heads
        scores = graph.add("MatMul", query, key, name=f"{prefix}.scores")
        scores = graph.add("Div", scores, self.scalar("scale", math.sqrt(spec.head_size)), name=f"{prefix}.scaled")
        scores = graph.add("Add", scores, bias, name=f"{prefix}.masked_scores")
        share = graph.add("Softmax", scores, name=f"{prefix}.softmax", axis=-1)
        context = graph.add("MatMul", share, value, name=f"{prefix}.context_heads")
        context = graph.add("Transpose", context, name=f"{prefix}.context_rows", perm=[0, 2, 1, 3])
        return graph.add("Reshape", context, graph.constant("join_heads", [0, 0, spec.hidden], np.int64), name=prefix)

    def dense_and_norm(self, prefix: str, states: str, residual: str) -> str:
        epsilon = self.spec.layer_norm_epsilon
        norm = [self.weight(f"{prefix}.LayerNorm.{name}") for name in ("weight", "bias")]
        if self.spec.fused:
            product = self.graph.add("MatMul", states, self.dense(f"{prefix}.dense"), name=f"{prefix}.dense")
            inputs = (product, residual, *norm, self.weight(f"{prefix}.dense.bias"))
            return self.contrib("SkipLayerNormalization", *inputs, name=prefix, epsilon=epsilon)
        total = self.graph.add("Add", self.linear(f"{prefix}.dense", states), residual, name=f"{prefix}.sum")
        return self.graph.add("LayerNormalization", total, *norm, name=prefix, axis=-1, epsilon=epsilon)

    def gelu(self, name: str, states: str) -> str:
        """GELU(x) = x / 2 * (1 + erf(x / sqrt 2)), Hendrycks and Gimpel 2016, the form that BERT was trained with."""
        graph = self.graph
        if self.spec.fused:
            product = graph.add("MatMul", states, self.dense(name), name=f"{name}.product")
            return self.contrib("BiasGelu", product, self.weight(f"{name}.bias"), name=f"{name}.gelu")
        wide = self.linear(name, states)
        curve = graph.add("Div", wide, self.scalar("sqrt_2", math.sqrt(2)), name=f"{name}.scaled")
        curve = graph.add("Erf", curve, name=f"{name}.erf")
        curve = graph.add("Add", curve, self.scalar("one_typed", 1.0), name=f"{name}.curve")
        curve = graph.add("Mul", wide, curve, name=f"{name}.doubled")
        return graph.add("Mul", curve, self.scalar("half", 0.5), name=f"{name}.gelu")

    def pool(self, states: str, mask: str) -> str:
        graph = self.graph
        if self.spec.pooling == "none":
            return states
        if self.spec.pooling == "cls":
            return graph.add("Gather", states, graph.constant("first_position", 0, np.int64), name="pooled", axis=1)
        axis = graph.constant("axes_1", [1], np.int64)
        count = graph.add("ReduceSum", mask, axis, name="mask_sum", keepdims=1)
        count = graph.add("Max", count, graph.constant("one", 1.0, np.float32), name="mask_count")
        share = self.to_model_type(graph.add("Div", mask, count, name="pool_share_f32"), "pool_share")
        share = graph.add("Unsqueeze", share, axis, name="pool_share_3d")
        pooled = graph.add("MatMul", share, states, name="pooled_3d")  # a product adds up in fp32, also for fp16
        return graph.add("Squeeze", pooled, axis, name="pooled")

    def normalise(self, pooled: str) -> str:
        """Divide by the L2 norm in fp32, as the squares of fp16 overflow; a zero row stays zero."""
        graph = self.graph
        rows = graph.add("Cast", pooled, name="pooled_f32", to=TensorProto.FLOAT)
        norm = graph.add("ReduceL2", rows, name="l2_norm", axes=[-1], keepdims=1)
        norm = graph.add("Max", norm, graph.constant("smallest_norm", 1e-12, np.float32), name="safe_l2_norm")
        return self.to_model_type(graph.add("Div", rows, norm, name="normalised_f32"), "normalised")
