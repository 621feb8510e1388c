"""What is planned: a network of `tfdist.models`, its optimizer, and noise to train it on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdist import models
from tfdist.config import TrainConfig
from tfdist.errors import ConfigurationError

if TYPE_CHECKING:
    import keras

#: What the networks that read tokens or write images are trained on, beside those of classifiers.
_OTHERS = ("autoencoder", "gpt", "unet")
#: Of `tfdist.models` those whose graph has no loop: in one live as many tensors as it has rounds.
KNOWN = (*models.IMAGE_CLASSIFIERS, *_OTHERS)


@dataclass(frozen=True)
class Network:
    """A network and how it is trained.

    Attributes:
        model: One of `tfdist.models`.
        input_shape: Of an example: height, width, channels; of gpt the number of tokens.
        num_classes: Of labels; of gpt the size of the vocabulary.
        optimizer: As of `python -m tfdist.train`.
        precision: As there.
        settings: Arguments of the model by name.

    Raises:
        ConfigurationError: The model has loops, in which tensors of unknown number live; or there
            is none of this name.
    """

    model: str
    input_shape: tuple[int, ...]
    num_classes: int = 1000
    optimizer: str = "adam"
    precision: str = "float32"
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.model not in KNOWN:
            raise ConfigurationError(
                f"--model {self.model}: its memory is not planned; expected one of "
                f"{', '.join(KNOWN)}."
            )

    def build(self) -> keras.Model:
        """Returns the compiled model."""
        import keras

        from tfdist import optimizers

        builder = getattr(models, self.model)
        if self.model == "autoencoder":
            model, loss = builder(self.input_shape, **self.settings), "mean_squared_error"
        else:
            first = self.num_classes if self.model == "gpt" else self.input_shape
            second = self.input_shape[0] if self.model == "gpt" else self.num_classes
            model = builder(first, second, **self.settings)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        fields: dict[str, Any] = {"optimizer": self.optimizer}
        config = TrainConfig(**fields)
        model.compile(optimizers.create(config, config.learning_rate), loss)
        return model

    def batch(self, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns examples and labels, all zero: what they are does not change what they take."""
        shape = (num_rows, *self.input_shape)
        x = np.zeros(shape, "int32" if self.model == "gpt" else "float32")
        if self.model == "autoencoder":
            return x, x
        labels = {"gpt": shape, "unet": shape[:3]}.get(self.model, (num_rows,))
        return x, np.zeros(labels, "int64")
