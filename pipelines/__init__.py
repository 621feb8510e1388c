"""TFRecord pipelines: sharded files with an index beside them, and the way back to batches.

`schema` says what a record holds, `index` what a folder holds, `write_shards` fills a folder
atomically, `read` turns it into a `tf.data.Dataset`. Nothing here needs `tfdist`.
"""

from pipelines.errors import DataError
from pipelines.index import Index, Shard, load_index
from pipelines.read import read
from pipelines.schema import Feature
from pipelines.write import write_shards

__all__ = ["DataError", "Feature", "Index", "Shard", "load_index", "read", "write_shards"]
