"""How images are stored: as the files they are, or decoded, resized and encoded again."""

from __future__ import annotations

import io
import re
import warnings
from typing import Literal, Self

from PIL import Image, ImageOps, UnidentifiedImageError
from pydantic import BaseModel, ConfigDict

from pipelines.errors import DataError
from pipelines.format.feature import Feature

_DEFAULT_QUALITY = 95
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
#: What Pillow raises for damaged files, see its handbook and its decoders.
_DAMAGE = (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError)


class ImageCoding(BaseModel):
    """What becomes of an image file on its way into a record.

    Attributes:
        format: of the stored file.
        channels: that reading will decode it to.
        size: `(height, width)` for exactly that size: the shorter side is resized and the middle
            cropped; one number for the shorter side alone; None leaves the size.
        quality: of JPEGs that are encoded again, 1 to 100; None leaves those alone that need no
            other change.
    """

    model_config = ConfigDict(frozen=True)

    format: Literal["jpeg", "png"]
    channels: int = 3
    size: int | tuple[int, int] | None = None
    quality: int | None = None

    @classmethod
    def of(
        cls, format: Literal["jpeg", "png"], channels: int, size: str | None, quality: int | None
    ) -> Self:
        """From what a user gives: `size` as `256` or `224x224`.

        Raises:
            DataError: it is none, or the others are out of their range.
        """
        if quality is not None and not (format == "jpeg" and 1 <= quality <= 100):
            raise DataError(f"--quality: expected 1 to 100, for jpeg, got {quality} for {format}")
        if channels not in _MODES or (format, channels) == ("jpeg", 4):
            raise DataError(f"--channels: expected 1, 3 or for png 4, got {channels} for {format}")
        if size is None:
            return cls(format=format, channels=channels, quality=quality)
        if not (match := re.fullmatch(r"([1-9]\d{0,4})(?:x([1-9]\d{0,4}))?", size)):
            raise DataError(
                f"--image-size: expected pixels as 256 (shorter side) or 224x224 (height x width), "
                f"got {size!r}"
            )
        height, width = match.groups()
        pixels = (int(height), int(width)) if width else int(height)
        return cls(format=format, channels=channels, size=pixels, quality=quality)

    @property
    def description(self) -> str:
        """Differs whenever the stored bytes would, which a feature does not tell."""
        size = f"{self.size[0]}x{self.size[1]}" if isinstance(self.size, tuple) else self.size
        words = [f"{self.channels} channels {self.format}"]
        words += [f"of {size} pixels"] if size else []
        words += [f"quality {self.quality}"] if self.quality else []
        return " ".join(words)

    def feature(self, name: str = "image") -> Feature:
        """The feature that holds such images."""
        height, width = self.size if isinstance(self.size, tuple) else (None, None)
        return Feature(
            name=name,
            dtype="uint8",
            shape=(height, width, self.channels),
            encoding=self.format,
        )

    def encode(self, data: bytes, name: str) -> bytes:
        """The bytes to store for the bytes of an image file.

        Args:
            data: of the file, in any format that Pillow reads.
            name: of the file, for errors.

        Returns:
            The same bytes where nothing is to be changed, all of which were looked at.

        Raises:
            DataError: the image is damaged, or has more channels than are stored.
        """
        try:
            with warnings.catch_warnings(), Image.open(io.BytesIO(data)) as image:
                warnings.simplefilter("ignore")  # about metadata, which is not stored
                self._check_channels(image, name)
                if self._keeps(image):
                    image.draft(None, (1, 1))  # every byte is read, few pixels are computed
                    image.load()
                    return data
                return self._write(self._resize(ImageOps.exif_transpose(image)))
        except DataError:
            raise
        except _DAMAGE as error:
            raise DataError(f"{name}: not an image that can be read: {error}") from None

    def _keeps(self, image: Image.Image) -> bool:
        return (image.format or "").lower() == self.format and self.size is self.quality is None

    def _check_channels(self, image: Image.Image, name: str) -> None:
        if self.channels < 3 and image.mode not in ("L", "1", "I", "I;16", "LA"):
            raise DataError(
                f"{name}: has colours ({image.mode}), but {self.channels} channel is stored; pass "
                "--channels 3"
            )

    def _resize(self, image: Image.Image) -> Image.Image:
        image = image.convert(_MODES[self.channels])
        if isinstance(self.size, tuple):
            height, width = self.size
            return ImageOps.fit(image, (width, height), Image.Resampling.BICUBIC)
        if self.size is None:
            return image
        scale = self.size / min(image.size)
        width, height = (max(1, round(side * scale)) for side in image.size)
        return image.resize((width, height), Image.Resampling.BICUBIC)

    def _write(self, image: Image.Image) -> bytes:
        out = io.BytesIO()
        quality = {"quality": self.quality or _DEFAULT_QUALITY} if self.format == "jpeg" else {}
        image.save(out, self.format, **quality)
        return out.getvalue()
