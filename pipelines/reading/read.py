"""From a folder of shards to batches: `read` top to bottom is the order of execution."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import tensorflow as tf

from pipelines.reading import batching
from pipelines.reading.batching import BatchFn, LastBatch, MixFn
from pipelines.reading.cache import cached
from pipelines.reading.data_service import through
from pipelines.reading.examples import AugmentFn, ExampleMaker, MapFn
from pipelines.reading.folder import Folder, OnCorrupt
from pipelines.reading.position import BEGINNING, Position, starts
from pipelines.reading.restart import with_restart
from pipelines.reading.tuning import DEFAULT, Tuning


def read(
    directory: str | Path,
    batch_size: int,
    *,
    shuffle_buffer: int = 0,
    seed: int | None = None,
    decode_images: bool = True,
    map_fn: MapFn | None = None,
    cache: str | Path | None = None,
    augment_fn: AugmentFn | None = None,
    last_batch: LastBatch = "keep",
    batch_fn: BatchFn | None = None,
    mix_fn: MixFn | None = None,
    context: tf.distribute.InputContext | None = None,
    start: Position | Callable[[], Position] = BEGINNING,
    on_corrupt: OnCorrupt = "raise",
    deterministic: bool | None = None,
    data_service: str | None = None,
    tuning: Tuning = DEFAULT,
) -> tf.data.Dataset:
    """Reads a folder of shards that has an index.

    Args:
        directory: the folder.
        batch_size: the global batch: examples per batch over all input pipelines.
        shuffle_buffer: examples that change places among each other, after blocks of records
            changed places over all files; each iteration has another order. Two to three such
            windows are in memory, as they are stored. 0 reads in the order of the files.
        seed: fixes the order of each epoch and what is drawn for each example. None draws one.
        decode_images: whether images become pixels before `map_fn`; otherwise it gets the bytes
            of the file, for maps that decode only the region they need (`pipelines.maps.images`).
        map_fn: what to make of one example, always the same; run in parallel.
        cache: keeps what `map_fn` made, from the first epoch on: `"memory"`, or a folder on disk.
            The folder is not made anew where `map_fn` changes: name another one then.
        augment_fn: what to make of that at random; its seed follows from `seed`, the epoch and
            the record alone. Run in parallel.
        last_batch: of an epoch, where it is not full. `"pad"` fills it up and makes every batch a
            pair: the batch, and which rows are its own, bool `(batch,)`.
        batch_fn: what to make of a batch; run in parallel. For what needs no look at single
            examples it is many times cheaper.
        mix_fn: what to make of that at random, say `pipelines.maps.layers.mixed`; its seed follows
            from `seed`, the epoch and the batch's first record. Run in parallel.
        context: says which of the pipelines that divide the data and each batch this is. Without
            one the dataset holds everything.
        start: where the first iteration begins; each further one reads the next epoch. What lies
            before is not read. A function is asked at the beginning of every iteration instead.
        on_corrupt: `"skip"` leaves corrupt records out, and logs and counts them.
        deterministic: whether the order may not depend on timing. By default it may only where
            there is a shuffle without a seed.
        data_service: address of a `tf.data` service, `grpc://HOST:PORT`, whose workers read and
            map; the shards must lie where they see them. Then the order follows from no seed.
        tuning: how much is done at once.

    Returns:
        Batches, by default of dictionaries by feature name. The cardinality is known where each
        iteration is a whole epoch. TensorFlow is told not to shard it again.

    Raises:
        DataError: the index or a shard is missing or of another size. A shard that is found
            corrupt only while reading raises `tf.errors.InvalidArgumentError` naming file and byte.
        ValueError: an unknown word; the batch cannot be divided among the pipelines; a start in an
            order that cannot be repeated; a cache or skipping with a data service; a `mix_fn` for
            batches that are filled up, divided, or of a service.
    """
    for name, word, known in (
        ("last_batch", last_batch, get_args(LastBatch)),
        ("on_corrupt", on_corrupt, get_args(OnCorrupt)),
    ):
        if word not in known:
            raise ValueError(f"{name}: expected one of {', '.join(known)}, got {word!r}")
    whole_batch, batch_size = batch_size, batching.per_pipeline(batch_size, context)
    divided = context is not None and context.num_input_pipelines > 1
    if mix_fn and (last_batch == "pad" or divided or data_service):
        raise ValueError(
            "mix_fn: expected whole global batches of rows that count; leave out last_batch='pad', "
            "data_service, and a context of several pipelines"
        )
    if data_service and (cache or on_corrupt == "skip"):
        raise ValueError("data_service: expected none with cache or on_corrupt='skip'; choose one")
    repeatable = not shuffle_buffer or seed is not None
    ordered = repeatable if deterministic is None else deterministic
    _check_start(start, repeatable=repeatable and ordered and not data_service)
    folder = Folder(
        directory,
        context=context,
        # What a cache keeps is shuffled when it comes out.
        shuffle_buffer=0 if cache else shuffle_buffer,
        seed=seed,
        on_corrupt=on_corrupt,
        portable=data_service is not None,
        tuning=tuning,
    )
    maker = ExampleMaker(folder.features, decode_images, map_fn, augment_fn)
    to_batches = functools.partial(
        batching.batches_of, maker=maker, batch_size=batch_size, num_maps=tuning.num_maps
    )
    drop = last_batch == "drop"
    if data_service:
        # Of a service's every worker the last batch may be short: none is dropped over there.
        records = folder.in_any_order()
        dataset = to_batches(records, folder.with_random_seeds, drop_remainder=False)
        dataset = through(dataset, data_service, batch_size, drop_remainder=drop)
    elif cache:
        begin = starts(start, batch_size)
        dataset = cached(begin, folder, maker.mapped, cache, shuffle_buffer, tuning.num_maps)
        augment = maker.augmented_with_seed if mix_fn else maker.augmented
        dataset = dataset.map(augment, tuning.num_maps).batch(batch_size, drop)
    else:
        records = folder.stream(starts(start, batch_size))
        dataset = to_batches(
            records, folder.with_seeds, drop_remainder=drop, keep_seeds=mix_fn is not None
        )
    if last_batch == "pad":
        dataset = dataset.map(functools.partial(batching.pad, batch_size=batch_size))
    is_whole = start == BEGINNING and on_corrupt == "raise"
    dataset = batching.finished(
        dataset,
        batch_fn=batching.mixing(batch_fn, mix_fn) if mix_fn else batch_fn,
        num_batches=(
            batching.num_batches(folder.num_records, batch_size, last_batch) if is_whole else None
        ),
        deterministic=ordered,
        tuning=tuning,
    )
    if not (repeatable and ordered) or data_service:
        return dataset

    def again(start: Callable[[], Position]) -> tf.data.Dataset:
        return read(
            directory, whole_batch, shuffle_buffer=shuffle_buffer, seed=seed,
            decode_images=decode_images, map_fn=map_fn, cache=cache, augment_fn=augment_fn,
            last_batch=last_batch, batch_fn=batch_fn, mix_fn=mix_fn, context=context, start=start,
            on_corrupt=on_corrupt, deterministic=deterministic, tuning=tuning,
        )  # fmt: skip

    return with_restart(dataset, again, start)


def _check_start(start: Position | Callable[[], Position], *, repeatable: bool) -> None:
    if start != BEGINNING and not repeatable:
        raise ValueError(
            "start: expected an order that can be repeated; give a seed, and leave deterministic "
            "out"
        )
