"""Image folders are stored unchanged, or re-encoded with options."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

import pipelines
from pipelines import DataError
from pipelines.sources import decoding, images, open_source
from pipelines.sources.source import Options
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
    with pytest.raises(DataError, match=r"found no images, that is, no files that end with \.apng"):
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
    assert str(error.value) == f"{expected}; to leave out such images, pass --skip-damaged"


@pytest.mark.parametrize("damaged", [(4,), (0, 4), (3, 4)])
def test_damaged_images_are_left_out_with_a_line(tmp_path: Path, damaged: tuple[int, ...]) -> None:
    source, out = tmp_path / "images", tmp_path / "out"
    source.mkdir()
    for i in range(5):
        data = pictures.encoded(i)
        (source / f"{i}.png").write_bytes(data[: len(data) // 2] if i in damaged else data)
    index = pipelines.pack_dataset(str(source), out, num_workers=1, skip_damaged=True)
    kinds = pipelines.load_account(out).kinds
    for fates in (kinds["files"], kinds["examples"]):
        assert (fates.found, fates.used) == (5, index.num_records) == (5, 5 - len(damaged))
        (group,) = fates.left_out.values()
        assert sorted(group.examples) == [f"{i}.png" for i in damaged]
    with pytest.raises(DataError, match=r"--strict: .*damaged"):
        pipelines.pack_dataset(str(source), out, num_workers=1, skip_damaged=True, strict=True)


def test_mixed_formats_need_a_choice(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(pictures.encoded(1))
    (tmp_path / "b.jpg").write_bytes(pictures.encoded(2, "jpeg"))
    with pytest.raises(DataError, match=r"found 1 \.png, 1 \.jpg; pass --image-format"):
        opened.source(tmp_path)
    (tmp_path / "b.jpg").unlink()
    (tmp_path / "b.bmp").write_bytes(pictures.encoded(2, "bmp"))
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


@pytest.mark.parametrize(
    ("image", "other", "message"),
    [
        ("train2017/a.png", "annotations/instances_train2017.json", "has boxes of COCO"),
        ("JPEGImages/a.png", "Annotations/a.xml", "has boxes of Pascal VOC"),
        ("images/train/a.png", "labels/train/a.txt", "has boxes of YOLO .*pass --from images"),
        ("cat/a.png", "labels.csv", "found images and csv here"),
        ("cat/a.DNG", "cat/notes.md", "raw data of a camera"),
    ],
)
def test_files_beside_images_are_named(
    image: str, other: str, message: str, tmp_path: Path
) -> None:
    for name in (image, other):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(pictures.encoded(7))
    with pytest.raises(DataError, match=message):
        opened.source(tmp_path, "images" if image.endswith("DNG") else "auto")


def photo(path: Path, kind: str, orientation: int | None = None, **more: Any) -> np.ndarray:
    """Saves an image with an orientation, and returns the pixels of it upright."""
    rows, columns = np.mgrid[0:16, 0:24]
    image = Image.fromarray(np.stack([rows * 15, columns * 10, 0 * rows], -1).astype(np.uint8))
    if orientation:
        more["exif"] = image.getexif()
        more["exif"][0x0112] = orientation
    if kind == "MPO":
        more |= {"save_all": True, "append_images": [Image.new("RGB", (8, 8))]}
    path.parent.mkdir(exist_ok=True)
    image.save(path, kind, **more)
    with Image.open(path) as saved:
        return np.asarray(ImageOps.exif_transpose(saved).convert("RGB"))


@pytest.mark.parametrize(
    ("kind", "stored"), [("JPEG", "jpeg"), ("MPO", "jpeg"), ("PNG", "png"), ("WEBP", "png")]
)
def test_photos_are_stored_upright(tmp_path: Path, kind: str, stored: str) -> None:
    lossless = {"lossless": True} if kind == "WEBP" else {}
    upright = [photo(tmp_path / "p" / f"{i}.{stored}", kind, i, **lossless) for i in range(1, 9)]
    source = open_source(str(tmp_path / "p"), "auto", Options(image_format=stored))
    for example, pixels in zip(opened.examples(source), upright, strict=True):
        assert example["image"].shape == pixels.shape
        assert np.abs(example["image"].astype(int) - pixels).mean() < 3
    assert source.changes.kinds["images"].changed["turned upright"].count == 7
    if kind != "WEBP":
        first = next(source.examples([0]))
        assert first["image"] == (tmp_path / "p" / f"1.{stored}").read_bytes()


NAMES = "x.jfif=JPEG x.JPE=JPEG x.avif=AVIF x.jp2=JPEG2000 x=JPEG x.new=WEBP x.ppm=PPM x.bmp=BMP"


@pytest.mark.parametrize("name", NAMES.split())
def test_images_are_recognized_by_their_contents(tmp_path: Path, name: str) -> None:
    name, _, kind = name.partition("=")
    photo(tmp_path / "a" / "0.jpg", "JPEG")
    pixels = photo(tmp_path / "b" / name, kind)
    examples = opened.examples(opened.source(tmp_path))
    assert [example["file"] for example in examples] == [b"a/0.jpg", f"b/{name}".encode()]
    assert np.abs(examples[1]["image"].astype(int) - pixels).mean() < 10


def test_heif_without_its_library_is_left_out_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    images._registers_heif.cache_clear()
    photo(tmp_path / "a" / "0.jpg", "JPEG")
    (tmp_path / "a" / "1.HEIC").write_bytes(b"\0\0\0\x18ftypheic")
    left_out = open_source(str(tmp_path), "auto", Options()).account.kinds["files"].left_out
    assert left_out["requires pip install pillow-heif"].examples == ["a/1.HEIC"]
    images._registers_heif.cache_clear()


def test_png_of_16_bits_keeps_its_values(tmp_path: Path) -> None:
    depth = (np.arange(48 * 64).reshape(48, 64) * 21).astype(np.uint16)
    Image.fromarray(depth).save(tmp_path / "0.png")
    source = opened.source(tmp_path)
    assert opened.features(source)["image"] == ("uint16", (None, None, 1), "png")
    np.testing.assert_array_equal(opened.examples(source)[0]["image"][..., 0], depth)
    (scaled,) = opened.examples(opened.source(tmp_path, bits=16, image_size="24"))
    assert scaled["image"].dtype == np.uint16
    source = open_source(str(tmp_path), "auto", Options(bits=8))
    assert opened.examples(source)[0]["image"].max() == depth.max() >> 8
    assert "reduced from 16 to 8 bits per channel" in source.changes.kinds["images"].changed
    Image.fromarray((depth % 200).astype(np.uint8)).save(tmp_path / "1.png")
    with pytest.raises(DataError, match=r"1\.png: has 8 bits .*others have 16.* --bits 8"):
        opened.examples(opened.source(tmp_path))


def _wrong_checksum(png: bytes) -> bytes:
    at = png.index(b"IDAT")
    at += 4 + int.from_bytes(png[at - 4 : at])
    return png[:at] + bytes([png[at] ^ 255]) + png[at + 1 :]


@pytest.mark.parametrize("damage", [_wrong_checksum, lambda png: png[:-12]], ids=["crc", "no end"])
def test_what_only_pillow_reads_is_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    photo(tmp_path / "0.png", "PNG")
    (tmp_path / "0.png").write_bytes(damage((tmp_path / "0.png").read_bytes()))
    with Image.open(tmp_path / "0.png") as image:
        image.load()
    with pytest.raises(DataError, match=r"0\.png: TensorFlow cannot decode this png"):
        opened.examples(opened.source(tmp_path))


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_usual_files_are_checked_without_tensorflow(tmp_path: Path, kind: str) -> None:
    for mode in ("L", "RGB"):
        buffer = io.BytesIO()
        Image.new(mode, (9, 7)).save(buffer, kind)
        assert decoding.is_plain(buffer.getvalue())
    buffer = io.BytesIO()
    Image.new("CMYK", (9, 7)).save(buffer, "JPEG")
    assert not decoding.is_plain(buffer.getvalue())


def test_thin_images_do_not_become_huge(tmp_path: Path) -> None:
    Image.new("RGB", (5000, 1)).save(tmp_path / "0.png")
    with pytest.raises(DataError, match=r"0\.png: 1x5000 pixels would become 256x1280000; crop"):
        opened.examples(opened.source(tmp_path, image_size="256"))
    (example,) = opened.examples(opened.source(tmp_path))
    assert example["image"].shape == (1, 5000, 3)


def test_masks_with_a_palette_keep_their_class_numbers(tmp_path: Path) -> None:
    numbers = (np.arange(12).reshape(3, 4) % 5).astype(np.uint8)
    mask = Image.fromarray(numbers, "P")
    mask.putpalette([(37 * i) % 256 for i in range(768)])
    mask.save(tmp_path / "mask.png")
    (example,) = opened.examples(opened.source(tmp_path, channels=1))
    np.testing.assert_array_equal(example["image"][..., 0], numbers)
