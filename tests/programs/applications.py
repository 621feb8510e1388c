"""Networks of `keras.applications` with synchronized BatchNorm, a small one of each kind.

In float64, two hundred layers stay within the tolerance if BatchNorm normalizes over several
values. Over one or two values, an error of 1e-15 in the inputs is too large even for plain Keras.
The last batch therefore has two images, and the last layers have more than one pixel. There is one
epoch, because each takes long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tests.programs.program import program
from tests.programs.rows import integers, normal
from tests.programs.vision import of_classes
from tests.support.case import compiled
from tests.support.data import Data

#: One network of each kind, with an image size for which its last layers have at least 4 pixels.
KINDS: dict[str, int] = {
    "MobileNet": 64,
    "MobileNetV2": 64,
    "MobileNetV3Small": 64,
    "VGG16": 64,
    "ResNet50": 64,
    "ResNet50V2": 64,
    "DenseNet121": 64,
    "EfficientNetB0": 64,
    "EfficientNetV2B0": 64,
    "ConvNeXtTiny": 64,
    "Xception": 71,
    "InceptionV3": 139,
    "InceptionResNetV2": 139,
    "NASNetMobile": 64,
}

#: Options that reduce the channels, for networks that have them.
NARROW: dict[str, dict[str, Any]] = {"MobileNet": {"alpha": 0.25}, "MobileNetV2": {"alpha": 0.35}}


def _builder(kind: str, size: int) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        made = getattr(keras.applications, kind)(
            weights=None, include_top=False, input_shape=(size, size, 3), pooling="avg",
            **NARROW.get(kind, {}),
        )  # fmt: skip
        outputs = keras.layers.Dense(3)(made.output)
        for layer in made.layers:
            if isinstance(layer, keras.layers.Dropout):
                layer.rate = 0.0  # each replica would draw its own numbers
        return compiled(keras.Model(made.input, outputs), keras.optimizers.SGD(0.01), of_classes())

    build.__name__ = kind.lower()
    build.__doc__ = f"`keras.applications.{kind}`."
    return build


for _kind, _size in KINDS.items():
    program(
        Data(normal(_size, _size, 3)[:5], integers(3)[:5]), batch_size=3, epochs=1,
        sync_batch_norm=True,
    )(_builder(_kind, _size))  # fmt: skip
