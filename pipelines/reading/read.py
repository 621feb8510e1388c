"""`read`: reads a folder of shards as batches. Its code lists the stages in order of execution."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import tensorflow as tf

from pipelines.reading import batching
from pipelines.reading.batching import AugmentFn, BatchFn, ExampleMapper, LastBatch, MapFn, MixFn
from pipelines.reading.folder import Folder, OnCorrupt, cached
from pipelines.reading.position import BEGINNING, Position, Record, starts, with_restart
from pipelines.reading.tuning import DEFAULT, Tuning, through_data_service
from pipelines.storage import AnyPath


def read(
    directory: str | AnyPath,
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

    Example:
        >>> dataset = pipelines.read(
        ...     "data/digits",
        ...     batch_size=64,
        ...     shuffle_buffer=1000,
        ...     seed=1,
        ...     map_fn=lambda example: (example["image"], example["label"]),
        ... )
        >>> history = tfdist.Trainer(build_model, devices=2).fit(dataset, verbose=0)

    Args:
        directory: The folder, local or a URL (`s3://`, `gs://`, `az://`).
        batch_size: Global batch size: examples per batch over all input pipelines.
        shuffle_buffer: Number of examples that are shuffled together, after blocks of records were
            shuffled over all files; fewer at the beginning of an epoch, so that the first batch is
            soon complete. Each epoch has another order. Two to three times this number of
            serialized examples are in memory. 0 keeps the order of the files.
        seed: Determines the order and the random numbers of each epoch. None draws a seed.
        decode_images: Whether to decode images to pixels before `map_fn`. Otherwise it gets the
            bytes of the files and can decode only the region it needs (`pipelines.maps.images`).
        map_fn: Maps one example, deterministically. Runs in parallel.
        cache: Caches the results of `map_fn` in the first epoch: `"memory"`, or a folder on disk.
            The cache is not renewed if `map_fn` changes: choose another folder then.
        augment_fn: Augments one example with a seed that depends only on `seed`, the epoch and the
            record. Runs in parallel.
        last_batch: Whether to keep, drop or pad a partial last batch. `"pad"` turns every batch
            into a pair: the batch, and a mask of the rows that are not padding, bool `(batch,)`.
        batch_fn: Maps a batch. Runs in parallel. For functions that do not need single examples,
            this is many times faster than `map_fn`.
        mix_fn: Randomly changes a batch, for example `pipelines.maps.layers.mixed`, with a seed
            that depends only on `seed`, the epoch and the batch's first record. Runs in parallel.
        context: Identifies this pipeline among those that divide the data and each batch. Without
            it the dataset contains everything.
        start: Start of the first iteration; each further one reads the next epoch. Data before the
            start are not read. A function is called at the start of every iteration instead.
        on_corrupt: `"skip"` skips corrupt records, and logs and counts them. So it does with images
            that cannot be decoded, for which all images are decoded once more.
        deterministic: Whether the order must not depend on timing. The default is true, except for
            shuffling without a seed.
        data_service: Address of a `tf.data` service, `grpc://HOST:PORT`, whose workers read and
            map. They must find the shards under the same path. The order is then not reproducible.
        tuning: Performance settings.

    Returns:
        Batches, by default of dictionaries by feature name. The cardinality is known if each
        iteration is a whole epoch. Automatic sharding by `tf.distribute` is turned off.

    Raises:
        DataError: The index or a shard is missing or has another size. A shard that is found to be
            corrupt while reading raises `tf.errors.InvalidArgumentError` with file and byte. An
            error of TensorFlow about an image or of `map_fn` does not name the record: a `Trainer`
            does, and `Restart.problem`.
        ValueError: An option has an unknown value; the batch cannot be divided among the pipelines;
            `start` is given for an order that is not reproducible; `cache` or
            `on_corrupt="skip"` is combined with `data_service`; or `mix_fn` is combined with
            padding, a divided batch or `data_service`.
    """
    for name, word, allowed in (
        ("last_batch", last_batch, get_args(LastBatch)),
        ("on_corrupt", on_corrupt, get_args(OnCorrupt)),
    ):
        if word not in allowed:
            raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {word!r}")
    global_batch_size, batch_size = batch_size, batching.pipeline_batch_size(batch_size, context)
    divided = context is not None and context.num_input_pipelines > 1
    if mix_fn and (last_batch == "pad" or divided or data_service):
        raise ValueError(
            "mix_fn: needs whole global batches without padding; remove last_batch='pad', "
            "data_service and the context of several pipelines"
        )
    if data_service and (cache or on_corrupt == "skip"):
        raise ValueError(
            "data_service: cannot be combined with cache or on_corrupt='skip'; choose one of them"
        )
    repeatable = not shuffle_buffer or seed is not None
    ordered = repeatable if deterministic is None else deterministic
    if start != BEGINNING and not (repeatable and ordered and not data_service):
        raise ValueError(
            "start: requires a reproducible order; pass a seed, and do not set deterministic=False"
        )
    folder = Folder(
        directory,
        context=context,
        # Cached examples are shuffled after the cache.
        shuffle_buffer=0 if cache else shuffle_buffer,
        seed=seed,
        on_corrupt=on_corrupt,
        portable=data_service is not None,
        tuning=tuning,
    )
    mapper = ExampleMapper(folder.features, decode_images, map_fn, augment_fn)
    to_batches = functools.partial(
        batching.batch_examples, mapper=mapper, batch_size=batch_size, num_maps=tuning.num_maps
    )
    drop = last_batch == "drop"
    if data_service:
        # Every worker of the service may end with a partial batch, which must not be dropped.
        dataset = to_batches(folder.unordered(), drop_remainder=False)
        dataset = through_data_service(dataset, data_service, batch_size, drop_remainder=drop)
    elif cache:
        begin = starts(start, batch_size)
        dataset = cached(begin, folder, mapper.map, cache, shuffle_buffer, tuning.num_maps)
        augment = mapper.augment_with_seed if mix_fn else mapper.augment
        dataset = dataset.map(augment, tuning.num_maps).batch(batch_size, drop)
    else:
        records = folder.stream(starts(start, batch_size))
        dataset = to_batches(records, drop_remainder=drop, keep_seeds=mix_fn is not None)
    if last_batch == "pad":
        dataset = dataset.map(functools.partial(batching.pad, batch_size=batch_size))
    is_whole = start == BEGINNING and on_corrupt == "raise"
    dataset = batching.finish(
        dataset,
        batch_fn=batching.mix_batches(batch_fn, mix_fn) if mix_fn else batch_fn,
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
            directory, global_batch_size, shuffle_buffer=shuffle_buffer, seed=seed,
            decode_images=decode_images, map_fn=map_fn, cache=cache, augment_fn=augment_fn,
            last_batch=last_batch, batch_fn=batch_fn, mix_fn=mix_fn, context=context, start=start,
            on_corrupt=on_corrupt, deterministic=deterministic, tuning=tuning,
        )  # fmt: skip

    def locate(position: Position) -> list[Record]:
        return folder.batch(position.epoch, position.batch * batch_size, batch_size)

    def explain(position: Position, num_batches: int) -> str | None:
        make = mapper.map_and_augment
        if cache:  # filled in the order of the files
            return folder.problem(make, position.epoch, 0, folder.num_records)
        begin, size = position.batch * batch_size, num_batches * batch_size
        return folder.problem(make, position.epoch, begin, size)

    return with_restart(dataset, again, start, None if cache or divided else locate, explain)
