"""How the workers meet before TensorFlow starts, and learn each other's addresses.

Rank 0 listens at its address, the others connect and say who they are, and when all have come, or
something is wrong, rank 0 sends the same answer to all. So a missing worker, two workers of one
rank or a port in use are an error on every worker within a bounded time, where TensorFlow would
wait. Workers that mpirun started meet over MPI instead.

Rank 0 receives O(1) bytes from each of n workers, and answers with O(1) bytes, so its cost is O(n).
Workers that do not know all addresses yet get them along a tree (`relay`): TensorFlow needs the n
addresses on each worker, 90 kB for 4,096 workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tfdist.cluster import gpus as gpus_of_workers
from tfdist.cluster import messages, networks, relay
from tfdist.cluster.networks import check_free, held_ports
from tfdist.cluster.record import Cluster, split
from tfdist.errors import ClusterError

#: Time for one message to arrive.
_MESSAGE_SECONDS = 10.0
_RETRY_SECONDS = 0.2
_BACKLOG = 4096


class Meeting(NamedTuple):
    """What a worker learns.

    Attributes:
        addresses: `"host:port"` of every worker, by rank.
        gpus: Positions of the GPUs that this worker uses, among those that it named.
    """

    addresses: tuple[str, ...]
    gpus: list[int]


_Text = Annotated[str, Field(max_length=300)]


class _Newcomer(BaseModel):
    """What a worker tells rank 0.

    Attributes:
        rank: Its rank.
        size: Number of workers.
        cluster: Digest of all addresses that it knows.
        address: Its own `"host:port"`.
        problem: What keeps it from taking part; empty: nothing.
        gpus: Identifiers of the GPUs that it sees or asks for.
        relay: `"host:port"` where others fetch the addresses; empty: nowhere.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    rank: Annotated[int, Field(ge=0)]
    size: Annotated[int, Field(ge=1)]
    cluster: _Text
    address: _Text
    problem: Annotated[str, Field(max_length=2000)] = ""
    gpus: Annotated[list[_Text], Field(max_length=64)] = []
    relay: _Text = ""


def meet(
    cluster: Cluster, seconds: float, gpus: Sequence[str] = (), share_gpus: bool = False
) -> Meeting:
    """Meets the other workers at rank 0's address.

    Takes O(n) messages and bytes at rank 0 with n workers, and O(n) bytes at each worker that does
    not know the addresses; otherwise O(1).

    Args:
        cluster: Its `addresses` are compared, if it has them; otherwise each worker chooses a free
            port on the interface from which it reached `master`.
        seconds: How long to wait for the others.
        gpus: Identifiers of the GPUs that this worker sees or asks for.
        share_gpus: Whether several workers may use one GPU; rank 0's value counts.

    Raises:
        ClusterError: Workers are missing, have the same rank, disagree about the cluster, or cannot
            listen at their address; or the GPUs cannot be divided.
    """
    return _run(meeting(cluster, seconds, gpus, share_gpus))


async def meeting(
    cluster: Cluster, seconds: float, gpus: Sequence[str] = (), share_gpus: bool = False
) -> Meeting:
    """Meets the other workers; see `meet`."""
    digest = hashlib.sha256("\n".join(cluster.addresses).encode()).hexdigest()
    me = _Newcomer(
        rank=cluster.rank,
        size=cluster.size,
        cluster=digest,
        address=cluster.address,
        gpus=list(gpus),
    )
    place = cluster.addresses[0] if cluster.addresses else cluster.master
    if cluster.rank == 0:
        return await _Rank0(cluster, place, me, seconds, share_gpus).run()
    if cluster.addresses:
        try:
            check_free(cluster.address)
        except ClusterError as error:  # so that the others hear of it
            me = me.model_copy(update={"problem": str(error)})
    # A little longer than rank 0 waits, which can name the missing workers.
    return await _ask(place, me, seconds + _MESSAGE_SECONDS, cluster.addresses)


class _Rank0:
    """Rank 0, which waits for the others."""

    def __init__(
        self, cluster: Cluster, place: str, me: _Newcomer, seconds: float, share_gpus: bool = False
    ) -> None:
        self._place, self._me, self._seconds = place, me, seconds
        self._size, self._share_gpus = cluster.size, share_gpus
        self._are_known = bool(cluster.addresses)
        self._listen_at = networks.listen_address([split(place)[0]])
        self._key = messages.job_key()
        self._workers = {0: me}
        self._connections: list[
            tuple[int, asyncio.StreamReader, asyncio.StreamWriter, messages.Session]
        ] = []
        self._problem = ""
        self._complete = asyncio.Event()

    async def run(self) -> Meeting:
        """Waits for all, sends them the answer, and returns it."""
        # Others reached rank 0 by this host name, so it is the one to give them.
        with _own_address(self._me, self._place.rpartition(":")[0]) as address:
            self._workers[0] = self._me.model_copy(update={"address": address})
            return await self._run()

    async def _run(self) -> Meeting:
        server = await self._listen()
        try:
            if self._size > 1:
                await asyncio.wait_for(self._complete.wait(), self._seconds)
        except TimeoutError:
            missing = [str(rank) for rank in range(self._size) if rank not in self._workers]
            more = f" and {len(missing) - 20} more" if len(missing) > 20 else ""
            self._problem = (
                f"Rank {', '.join(missing[:20])}{more} of {self._size} did not come to rank 0 at "
                f"{self._place} within {self._seconds:.0f} s: check whether it was started, "
                f"reaches that address and has the same {messages.SECRET}."
            )
        server.close()  # TensorFlow listens at this port next
        divided: list[list[int]] = []
        if not self._problem:
            try:
                claims = [self._workers[rank].gpus for rank in range(self._size)]
                divided = gpus_of_workers.divide(claims, self._share_gpus)
            except ClusterError as error:
                self._problem = str(error)
        addresses = [self._workers[rank].address for rank in sorted(self._workers)]

        def answer(rank: int) -> dict[str, Any]:
            own = divided[rank] if divided else []
            return {"problem": self._problem, "gpus": own, **self._source(rank, addresses)}

        await asyncio.gather(
            *(
                _send_last(reader, writer, session.sign(answer(rank)))
                for rank, reader, writer, session in self._connections
            )
        )
        _check(self._problem)
        return Meeting(tuple(addresses), divided[0])

    def _source(self, rank: int, addresses: list[str]) -> dict[str, Any]:
        """Returns the addresses for a worker, or where it fetches them, unless it knows them."""
        if self._problem or self._are_known:
            return {}
        parent = relay.parent_of(rank)
        return {"relay": self._workers[parent].relay} if parent else {"addresses": addresses}

    async def _listen(self) -> asyncio.Server:
        try:
            return await asyncio.start_server(
                self._receive,
                self._listen_at or None,
                split(self._place)[1],
                limit=messages.FIRST_LIMIT,
                backlog=_BACKLOG,
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                await self._ask_who_listens()
            reason = os.strerror(error.errno or 0)  # asyncio's own text names 0.0.0.0
            raise ClusterError(
                f"Rank 0 cannot listen at {self._place} ({reason}): end the process that listens "
                "there, or choose another port."
            ) from None

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Receives one worker's message."""
        worker = None
        session = await messages.greet(writer, self._key)
        with contextlib.suppress(OSError, ValidationError):
            async with asyncio.timeout(_MESSAGE_SECONDS):
                message = await messages.receive(reader, session)
            worker = _Newcomer.model_validate(message)
        if worker is None:
            writer.close()  # a port scanner, or a worker of another job
            return
        rank = worker.rank
        self._connections.append((rank, reader, writer, session))
        if (worker.size, worker.cluster) != (self._me.size, self._me.cluster) or rank >= self._size:
            self._problem = (
                f"Rank {rank} and rank 0 have different lists of workers ({worker.size} and "
                f"{self._size} workers): give all workers the same addresses, in the same order."
            )
        elif rank in self._workers:
            self._problem = f"Two workers are rank {rank}: give each a rank, or index, of its own."
        elif worker.problem:
            self._problem = f"Rank {rank}: {messages.printable(worker.problem, 2000)}"
        else:
            self._workers[rank] = worker
        if self._problem or len(self._workers) == self._size:
            self._complete.set()

    async def _ask_who_listens(self) -> None:
        """Raises an error for both if another worker that claims to be rank 0 listens there."""
        try:
            await _ask(self._place, self._me, _MESSAGE_SECONDS, ())
        except ClusterError as error:
            if "Two workers" in str(error):
                raise


async def _ask(place: str, me: _Newcomer, seconds: float, known: tuple[str, ...]) -> Meeting:
    """Connects to rank 0, again while it does not listen, and returns its answer.

    Args:
        place: `"host:port"` of rank 0.
        me: This worker; its address is filled in if it is empty.
        seconds: Time limit.
        known: The addresses of all workers, if this worker has them.

    Raises:
        ClusterError: Rank 0 did not answer in time, or reports a problem.
    """
    reason, was_reached = "it does not answer", False
    try:
        async with asyncio.timeout(seconds):
            while True:
                try:
                    return await _ask_once(place, me, known)
                except OSError as error:  # it does not listen yet, or its name is not known yet
                    is_reached = error.errno is None  # what rank 0 said, not the network
                    if is_reached or not was_reached:
                        reason = error.strerror or str(error)
                    was_reached = was_reached or is_reached
                await asyncio.sleep(_RETRY_SECONDS)
    except TimeoutError:
        raise ClusterError(
            f"Rank {me.rank} waited {seconds:.0f} s for rank 0 at {place} ({reason}): check "
            "whether it was started, and whether this host reaches that address."
        ) from None


async def _ask_once(place: str, me: _Newcomer, known: tuple[str, ...]) -> Meeting:
    """Asks once.

    Raises:
        OSError: Rank 0 does not listen, or goes away.
        ClusterError: Rank 0 reports a problem, or the addresses do not arrive.
    """
    host, port = split(place)
    reader, writer = await asyncio.open_connection(host, port, limit=messages.LIMIT)
    own = writer.get_extra_info("sockname")[0]
    # The port is held until all workers have one, so that those of one host get different ones.
    with _own_address(me, f"[{own}]" if ":" in own else own) as address:
        async with relay.Relay(me.rank, 0 if known else me.size, own) as children:
            places = {"address": address, "relay": children.address}
            answer = await _exchange(reader, writer, me.model_copy(update=places))
            _check(str(answer["problem"]))
            if known:
                return Meeting(known, answer["gpus"])
            found: Mapping[str, Any] = answer
            if "addresses" not in answer:
                found = await relay.fetch(answer["relay"], me.rank)
            await children.pass_on({"addresses": found["addresses"]})
            return Meeting(tuple(found["addresses"]), answer["gpus"])


@contextlib.contextmanager
def _own_address(me: _Newcomer, host: str) -> Iterator[str]:
    """Yields a worker's address: the known one, or a free port, held within the block."""
    if me.address:
        yield me.address
        return
    with held_ports(1) as (port,):
        yield f"{host}:{port}"


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, me: _Newcomer
) -> Mapping[str, Any]:
    """Sends what this worker is, and returns rank 0's answer."""
    try:
        async with asyncio.timeout(_MESSAGE_SECONDS):
            session = await messages.answer(reader, messages.job_key())
        writer.write(session.sign(me.model_dump()))
        answer = await messages.receive(reader, session)
    except TimeoutError:
        raise ConnectionError("it is not a worker of tfdist") from None
    finally:
        writer.close()
    if answer is None:
        raise ConnectionError(
            f"it ended, or belongs to another job: is {messages.SECRET} the same on all workers?"
        )
    return answer


def _check(problem: str) -> None:
    """Raises a ClusterError if there is a problem."""
    if problem:
        raise ClusterError(messages.printable(problem, 4000))


async def _send_last(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: bytes
) -> None:
    """Sends the answer to a worker, if it is still there."""
    writer.write(line)
    with contextlib.suppress(OSError):
        async with asyncio.timeout(_MESSAGE_SECONDS):
            # The side that closes first blocks its port for a while: it must not be rank 0's.
            await reader.read()
    writer.close()


def _run(coroutine: Coroutine[Any, Any, Meeting]) -> Meeting:
    """Runs a coroutine; in a thread if this one has an event loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


def meet_over_mpi(cluster: Cluster, gpus: Sequence[str], share_gpus: bool) -> Meeting:
    """Meets the other workers over MPI, by an all-gather. Ports were free a moment ago.

    Args:
        cluster: Cluster of this process, without addresses.
        gpus: Identifiers of the GPUs that this worker sees or asks for.
        share_gpus: Whether several workers may use one GPU.

    Raises:
        ClusterError: mpi4py is missing, or uses another MPI than mpirun; or the GPUs cannot be
            divided.
    """
    mpi = _usable_mpi(cluster)
    was_initialized = mpi.Is_initialized()
    if not was_initialized:
        mpi.Init()
    world = mpi.COMM_WORLD
    if (world.rank, world.size) != (cluster.rank, cluster.size):
        raise ClusterError(
            f"{cluster.source} says rank {cluster.rank} of {cluster.size}, mpi4py's library says "
            f"{world.rank} of {world.size} ({mpi.get_vendor()[0]}): "
            "use the mpirun of the MPI that mpi4py loads."
        )
    # Held until all workers have a port, so that those of one host get different ones.
    with held_ports(1) as (port,):
        gathered = world.allgather((networks.this_host(), port, tuple(gpus)))
    if not was_initialized:
        # Now, while all ranks are here: at exit it would wait for ranks that failed.
        mpi.Finalize()
    hosts = networks.reachable([host for host, _, _ in gathered])
    addresses = tuple(f"{host}:{port}" for host, (_, port, _) in zip(hosts, gathered, strict=True))
    divided = gpus_of_workers.divide([claim for _, _, claim in gathered], share_gpus)
    return Meeting(addresses, divided[cluster.rank])


def _usable_mpi(cluster: Cluster) -> ModuleType:
    try:
        return load_mpi()
    except (ImportError, RuntimeError) as error:
        raise ClusterError(
            f"{cluster.source} gives the workers no addresses, and mpi4py, which exchanges them, "
            f"is not usable ({' '.join(str(error).split())[:100]}): pip install mpi4py, or set "
            "TF_CONFIG."
        ) from None


def load_mpi() -> ModuleType:
    """Returns mpi4py's MPI, not initialized.

    Raises:
        ImportError: It is not installed.
        RuntimeError: It finds no MPI library.
    """
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    return MPI
