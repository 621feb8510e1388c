"""Rules of products, of convolutions, and of functions of the last axes."""

from __future__ import annotations

from typing import Any

from tfdist.rows import dependence
from tfdist.rows.dependence import (
    FREE,
    MIXED,
    UNKNOWN,
    Dependence,
    Kind,
    Rule,
    Values,
    beside_each_other,
    given_plain,
    summed,
    worst,
)

#: Operations whose first input and output have one entry per row along the first axis, and whose
#: other inputs are weights; by the place of the input with rows.
_LEADING = {
    0: """
    AvgPool AvgPool3D BiasAdd Conv Conv1D Conv2D Conv3D DepthwiseConv2dNative Dilation2D
    ExtractImagePatches LRN MaxPool MaxPool3D MaxPoolV2 ResizeArea ResizeBicubic ResizeBilinear
    ResizeNearestNeighbor SpaceToDepth DepthToSpace AdjustHue AdjustSaturation HSVToRGB RGBToHSV
    """,
    2: "Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput",
}

#: Label of axes of length 1, which are broadcast.
_BROADCAST = "_"

#: Functions of the last axes of a tensor, by the number of these axes.
_LAST_AXES = {
    "Softmax": 1, "LogSoftmax": 1, "TopKV2": 1, "TopK": 1, "Cholesky": 2,
    "MatrixBandPart": 2, "MatrixInverse": 2, "MatrixDeterminant": 2, "MatrixDiagPartV3": 2,
    "MatrixDiagV3": 1,
    "Svd": 2, "Qr": 2, "SelfAdjointEigV2": 2, "FFT": 1, "IFFT": 1, "RFFT": 1, "IRFFT": 1,
    "FFT2D": 2, "IFFT2D": 2, "RFFT2D": 2, "IRFFT2D": 2, "AdjustContrastv2": 3,
}  # fmt: skip


def _last_axes(op: Any, values: Values) -> Dependence:
    value, rank = values[0], op.inputs[0].shape.rank
    if value.kind is not Kind.ROWS:
        return dependence.elementwise(op.inputs[:1], values[:1], op.outputs[0])
    if rank is None:
        return UNKNOWN
    return MIXED if value.power or value.axis >= rank - _LAST_AXES[op.type] else value


def _diagonal(op: Any, values: Values) -> Dependence:
    """`MatrixDiagV3`: matrices with one diagonal each."""
    if values[0].kind is Kind.ROWS and op.inputs[1].shape.rank != 0:
        return UNKNOWN  # perhaps a diagonal for each row
    return _last_axes(op, values)


def _leading(op: Any, values: Values, place: int) -> Dependence:
    others = [v for i, v in enumerate(values) if i != place]
    if values[place].is_led_by_rows:
        kinds = (v.is_plain or (v.kind is Kind.SHAPE and place == 2) for v in others)
        return values[place] if all(kinds) else worst(others) or UNKNOWN
    return FREE if all(v.is_plain for v in values) else worst(values) or UNKNOWN


def _transformed(op: Any, values: Values) -> Dependence:
    """`ImageProjectiveTransformV3`: one transform for all images, or one for each."""
    images, transforms = values[:2]
    if images == transforms and images.is_row_wise:
        return images
    # One transform may be for a fixed number of images.
    is_one = transforms.is_plain and op.inputs[1].shape[0] == 1
    return images if is_one and images.is_row_wise else worst(values) or UNKNOWN


def _product(op: Any, values: Values) -> Dependence:
    """`MatMul` and `BatchMatMulV2`, as sums over labeled axes."""
    ranks = [t.shape.rank for t in list(op.inputs)[:2]]
    if None in ranks:
        return _einsum_of(op, values, None, "")
    turned = [
        any(n in op.node_def.attr and op.get_attr(n) for n in names)
        for names in (("transpose_a", "adj_x"), ("transpose_b", "adj_y"))
    ]
    ends = ["km" if turned[0] else "mk", "nk" if turned[1] else "kn"]
    rank = max(ranks)
    letters = "abcdefgh"[: rank - 2]
    labels = []
    for tensor, own_rank, end in zip(list(op.inputs)[:2], ranks, ends, strict=True):
        front = letters[len(letters) - (own_rank - 2) :]
        labels.append([*_of_axes(front, tensor.shape[: own_rank - 2]), *end])
    return _einsum_of(op, values, labels, letters + "mn")


def _of_axes(labels: str, lengths: Any) -> list[str]:
    """Returns the labels of axes that are broadcast if their length is 1."""
    return [_BROADCAST if n == 1 else c for c, n in zip(labels, lengths, strict=True)]


def _einsum(op: Any, values: Values) -> Dependence:
    given, out = op.get_attr("equation").decode().replace(" ", "").split("->")
    parts = given.split(",")
    if "..." not in given:
        return _einsum_of(op, values, [list(part) for part in parts], out)
    # Each factor has the last ones of the axes that the dots stand for.
    ranks = [tensor.shape.rank for tensor in op.inputs]
    if None in ranks:
        return _einsum_of(op, values, None, "")
    numbers = [rank - len(p.replace("...", "")) for rank, p in zip(ranks, parts, strict=True)]
    dots, labels = "0123456789"[: max(numbers)], []
    for tensor, part, number in zip(op.inputs, parts, numbers, strict=True):
        before, _, after = part.partition("...")
        lengths = tensor.shape[len(before) : len(before) + number]
        labels.append([*before, *_of_axes(dots[len(dots) - number :], lengths), *after])
    return _einsum_of(op, values, labels, out.replace("...", dots))


def _einsum_of(op: Any, values: Values, labels: list[list[str]] | None, out: str) -> Dependence:
    """Returns the class of a sum of products.

    Args:
        op: The operation.
        values: The classes of its factors.
        labels: Those of the axes of each factor; None if they are not known.
        out: The labels of the axes of the result.
    """
    if (bad := worst(values)) is not None:
        return bad
    if all(value.is_plain for value in values):
        return FREE
    power = sum(value.power for value in values)
    kinds = [value.kind for value in values]
    if Kind.SUMMED in kinds:
        return summed(power) if kinds.count(Kind.FREE) == len(kinds) - 1 else MIXED
    if Kind.ROWS not in kinds or labels is None:
        return UNKNOWN
    pairs = list(zip(values, labels, strict=True))
    of_rows = [(v, axes[v.axis]) for v, axes in pairs if v.kind is Kind.ROWS]
    of_row_axes = {label for _, label in of_rows}
    if len(of_row_axes) > 1:
        return MIXED
    label = of_row_axes.pop()
    if label == _BROADCAST:
        return UNKNOWN
    if any(label in axes for v, axes in pairs if v.kind is not Kind.ROWS):
        return MIXED  # a weight for each place in the batch
    is_kept = label in out
    result = beside_each_other(values, out.index(label) if is_kept else 0, power)
    return result if is_kept or result is UNKNOWN else summed(power)


def _rules() -> dict[str, Rule]:
    rules: dict[str, Rule] = dict.fromkeys(_LAST_AXES, given_plain(_last_axes, 1, 2))
    for index, text in _LEADING.items():
        rule = lambda op, v, index=index: _leading(op, v, index)  # noqa: E731
        rules |= dict.fromkeys(text.split(), rule)
    rules |= dict.fromkeys(["MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"], _product)
    rules["MatrixDiagV3"] = given_plain(_diagonal, 1, 2, 3, 4)
    names = ["ImageProjectiveTransformV2", "ImageProjectiveTransformV3"]
    return rules | dict.fromkeys(names, given_plain(_transformed, 2, 3)) | {"Einsum": _einsum}


#: The rules, by type of operation.
RULES = _rules()
