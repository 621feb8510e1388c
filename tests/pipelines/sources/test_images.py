"""Image folders are stored unchanged, or re-encoded with options."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipelines import DataError
from tests.support import opened, pictures


def test_files_are_stored_unchanged(tmp_path: Path) -> None:
    pictures.write_classes(tmp_path, 4, "jpeg")
    source = opened.source(tmp_path)
    assert opened.features(source) == {
        "image": ("uint8", (None, None, 3), "jpeg"),
        "label": ("int64", (), "list"),
        "file": ("string", (), "bytes"),
    }
    for example in source.examples([3, 0]):
        assert example["image"] == (tmp_path / str(example["file"])).read_bytes()


def test_without_class_folders_no_label_is_stored(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(pictures.encoded(7))
    source = opened.source(tmp_path)
    assert set(opened.features(source)) == {"image", "file"}
    (example,) = opened.examples(source)
    np.testing.assert_array_equal(example["image"], pictures.pixels(7))


def test_folder_without_images_raises(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(DataError, match=r"found no images, that is, no files that end with \.bmp"):
        opened.source(tmp_path, "images")


def test_gray_images_have_one_channel(tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 4), 9, np.uint8)).save(tmp_path / "a.png")
    source = opened.source(tmp_path)
    assert opened.features(source)["image"] == ("uint8", (None, None, 1), "png")
    assert opened.examples(source)[0]["image"].tolist() == [[[9]] * 4] * 4


def test_images_of_16_bits_are_scaled_to_8_bits(tmp_path: Path) -> None:
    pixels = np.array([[0, 256, 40_000, 65_535]], np.uint16)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    (example,) = opened.examples(opened.source(tmp_path, image_size="1x4"))
    np.testing.assert_array_equal(example["image"][0, :, 0], pixels[0] >> 8)
    Image.fromarray(pixels.astype("float32")).save(tmp_path / "b.tif")
    with pytest.raises(DataError, match=r"b\.tif: has values of 32 bits"):
        opened.examples(opened.source(tmp_path, image_format="png"))


def test_color_images_are_not_stored_in_one_channel(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(pictures.encoded(7))
    with pytest.raises(DataError, match=r"a\.png: is a color image \(RGB\).* pass --channels 3"):
        opened.examples(opened.source(tmp_path, channels=1))


@pytest.mark.parametrize(
    ("size", "shape", "first"),
    [
        ("10", (None, None, 3), (10, 12, 3)),
        ("8x6", (8, 6, 3), (8, 6, 3)),
        ("40", (None, None, 3), (40, 48, 3)),
    ],
)
def test_image_size_determines_the_stored_shape(
    tmp_path: Path, size: str, shape: object, first: tuple[int, ...]
) -> None:
    (tmp_path / "a.png").write_bytes(pictures.encoded(7))
    source = opened.source(tmp_path, image_size=size)
    assert opened.features(source)["image"][1] == shape
    (example,) = opened.examples(source)
    assert example["image"].shape == first
    assert (example["image"] == pictures.pixels(7)[0, 0]).all()


@pytest.mark.parametrize("options", [{}, {"channels": 3}])
def test_file_that_is_no_image_is_named(tmp_path: Path, options: dict[str, int]) -> None:
    (tmp_path / "a.png").write_bytes(b"no picture")
    with pytest.raises(DataError) as error:
        opened.examples(opened.source(tmp_path, **options))
    expected = f"{tmp_path}/a.png: not a readable image: its format is not known, or it is damaged"
    assert str(error.value) == expected


def test_mixed_formats_need_a_choice(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(pictures.encoded(1))
    (tmp_path / "b.bmp").write_bytes(pictures.encoded(2, "bmp"))
    with pytest.raises(DataError, match=r"found 1 \.png, 1 \.bmp; pass --image-format"):
        opened.source(tmp_path)
    images = [e["image"] for e in opened.examples(opened.source(tmp_path, image_format="png"))]
    np.testing.assert_array_equal(images, [pictures.pixels(1), pictures.pixels(2)])


def test_image_with_a_wrong_suffix_is_re_encoded(tmp_path: Path) -> None:
    (tmp_path / "a.jpeg").write_bytes(pictures.encoded(7, "png"))
    source = opened.source(tmp_path)
    (example,) = opened.examples(source)
    assert opened.features(source)["image"][2] == "jpeg"
    assert np.abs(example["image"].astype(int) - pictures.pixels(7)).max() < 4


def test_quality_makes_files_smaller(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.jpg", quality=95)
    sizes = [
        len(next(opened.source(tmp_path, quality=quality).examples([0]))["image"])
        for quality in (20, 80)
    ]
    assert sizes[0] < sizes[1] < (tmp_path / "a.jpg").stat().st_size


def test_rotation_of_exif_is_applied_when_re_encoding(tmp_path: Path) -> None:
    picture = Image.fromarray(pictures.pixels(7))
    exif = picture.getexif()
    exif[0x0112] = 6  # orientation: to be turned by 90 degrees
    picture.save(tmp_path / "a.jpg", exif=exif)
    (example,) = opened.examples(opened.source(tmp_path, quality=90))
    assert example["image"].shape == (24, 20, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": "10x"}, "--image-size: expected pixels as 256"),
        ({"image_size": "0"}, "--image-size"),
        ({"quality": 50}, "--quality: expected 1 to 100, for jpeg, got 50 for png"),
        ({"channels": 2}, "--channels: expected 1, 3"),
    ],
)
def test_invalid_options_are_rejected(
    tmp_path: Path, options: dict[str, object], message: str
) -> None:
    (tmp_path / "a.png").write_bytes(pictures.encoded(7))
    with pytest.raises(DataError, match=message):
        opened.source(tmp_path, **options)


def test_file_beside_class_folders_has_no_class(tmp_path: Path) -> None:
    pictures.write_classes(tmp_path, 2)
    (tmp_path / "stray.png").write_bytes(pictures.encoded(7))
    with pytest.raises(DataError, match=r"stray\.png: has no class"):
        opened.source(tmp_path)


def test_several_kinds_need_a_choice(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(pictures.encoded(7))
    (tmp_path / "a.txt").write_text("a line")
    with pytest.raises(
        DataError, match="found images and text here; choose the format with --from"
    ):
        opened.source(tmp_path)
    assert "text" in opened.features(opened.source(tmp_path, "text"))
