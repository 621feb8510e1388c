"""The workers of a run, and the rank of this process. Imports no TensorFlow."""

from tfdist.cluster.membership import barrier as barrier
from tfdist.cluster.membership import current as current
from tfdist.cluster.membership import discover as discover
from tfdist.cluster.membership import end as end
from tfdist.cluster.membership import exchange_addresses as exchange_addresses
from tfdist.cluster.membership import is_chief as is_chief
from tfdist.cluster.membership import leave as leave
from tfdist.cluster.membership import on_barrier as on_barrier
from tfdist.cluster.membership import on_end as on_end
from tfdist.cluster.membership import rank as rank
from tfdist.cluster.membership import size as size
from tfdist.cluster.membership import started_together as started_together
from tfdist.cluster.membership import use as use
from tfdist.cluster.record import Cluster as Cluster
