"""`Feature`: one named array of a record and its encoding. Does not import TensorFlow."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, NonNegativeInt, model_validator

DType = Literal[
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
    "string",
]
Encoding = Literal["raw", "list", "bytes", "jpeg", "png"]

#: Allowed dtypes by image encoding. `raw` and `list` hold numbers of any dtype.
_IMAGE_DTYPES = {"jpeg": ("uint8",), "png": ("uint8", "uint16")}

#: The first bytes of an image file: https://www.w3.org/TR/png, ITU-T T.81 (SOI and a marker).
_IMAGE_BEGINS = {"jpeg": b"\xff\xd8\xff", "png": b"\x89PNG\r\n\x1a\n"}


class Feature(BaseModel):
    """One named array of a record.

    Example:
        >>> label = pipelines.Feature(
        ...     name="label", dtype="int64", encoding="list", label_names=("cat", "dog")
        ... )
        >>> label.shape
        ()

    Attributes:
        name: The key in the record and in the dictionaries that reading yields.
        dtype: The NumPy name of the dtype, which reading restores; `string` for bytes.
        shape: The shape of the array, `()` for a scalar. A dimension that differs between records
            is None: the first one of a `list` or of `bytes`, or the height and width of an image.
        encoding: `raw` stores the array's little-endian bytes and suits large numeric arrays.
            `list` stores an Int64List or FloatList, which other TFRecord readers understand, and
            suits labels and short vectors. `bytes` stores one byte string (text or anything
            opaque) per element of the shape. `jpeg` and `png` store an encoded image.
        label_names: For a class label, the name of each class in order. For a vector of
            attributes, the name of each element. Otherwise empty.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    dtype: DType
    shape: tuple[NonNegativeInt | None, ...] = ()
    encoding: Encoding = "raw"
    label_names: tuple[str, ...] = ()

    @property
    def is_image(self) -> bool:
        """Whether the feature is an encoded image."""
        return self.encoding in _IMAGE_DTYPES

    @property
    def is_ragged(self) -> bool:
        """Whether the number of stored values differs between records."""
        return self.encoding in ("list", "bytes") and None in self.shape

    @model_validator(mode="after")
    def _encoding_fits_dtype(self) -> Self:
        if (self.encoding == "bytes") != (self.dtype == "string"):
            self._refuse("encoding 'bytes' requires dtype 'string' and the reverse; declare both")
        if self.encoding == "list" and self.dtype == "float64":
            self._refuse(
                "a FloatList holds float32, so encoding 'list' would round float64; use encoding "
                "'raw' or dtype 'float32'"
            )
        if self.is_image and self.dtype not in _IMAGE_DTYPES[self.encoding]:
            expected = " or ".join(_IMAGE_DTYPES[self.encoding])
            self._refuse(f"encoding {self.encoding!r}: expected dtype {expected}, got {self.dtype}")
        return self

    @model_validator(mode="after")
    def _shape_fits_encoding(self) -> Self:
        if self.is_image and (len(self.shape) != 3 or self.shape[2] not in (1, 3, 4)):
            self._refuse(
                f"encoding {self.encoding!r}: expected the shape (height, width, channels) with 1, "
                f"3 or 4 channels, got {self.shape}"
            )
        if self.encoding == "raw" and None in self.shape:
            self._refuse(
                f"encoding 'raw' requires a fixed shape, got {self.shape}; use 'list' if the first "
                "dimension differs between records"
            )
        if self.is_ragged and (self.shape[0] is not None or None in self.shape[1:]):
            self._refuse(f"only the first dimension may differ between records, got {self.shape}")
        return self

    def _refuse(self, message: str) -> None:
        raise ValueError(f"feature {self.name!r}: {message}")


def image_format(data: bytes) -> Encoding | None:
    """Returns the encoding of an image file's bytes, or None for any other bytes."""
    encodings: tuple[Encoding, ...] = ("jpeg", "png")
    return next((e for e in encodings if data.startswith(_IMAGE_BEGINS[e])), None)
