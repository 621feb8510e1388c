"""A rendezvous of all workers before TensorFlow starts, to exchange addresses and detect errors.

Rank 0 listens at its address. The other workers connect and send their rank and address. When all
have connected, or an error occurs, rank 0 sends the same reply to all. A missing worker, a
duplicate rank or a port in use thus raises an error on every worker within a bounded time, instead
of letting TensorFlow wait. Workers that mpirun started exchange addresses over MPI instead.

Rank 0 receives O(1) bytes from each of n workers and replies with O(1) bytes, so its cost is O(n).
Workers that do not know all addresses receive them along a tree (`relay`), because TensorFlow needs
all n addresses on each worker: 90 kB for 4,096 workers.
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
from tfdist.cluster import messages, networks
from tfdist.cluster.networks import check_free, reserved_ports
from tfdist.cluster.record import Cluster, joined, split
from tfdist.errors import ClusterError

#: Time limit for receiving one message.
_MESSAGE_SECONDS = 10.0
_RETRY_SECONDS = 0.2
_BACKLOG = 4096


class Meeting(NamedTuple):
    """The result of the rendezvous for one worker.

    Attributes:
        addresses: `"host:port"` of every worker, by rank.
        gpus: Indices of this worker's GPUs in the list that it sent.
    """

    addresses: tuple[str, ...]
    gpus: list[int]


_Text = Annotated[str, Field(max_length=300)]


class _Worker(BaseModel):
    """The message that a worker sends to rank 0.

    Attributes:
        rank: Its rank.
        size: Number of workers.
        cluster: Digest of all addresses that it knows.
        address: Its `"host:port"`.
        problem: An error of this worker; empty if there is none.
        gpus: Identifiers of the GPUs that it sees or requests.
        relay: `"host:port"` at which others fetch the addresses; empty if it has no children.
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
    """Waits for all workers, and exchanges addresses through rank 0.

    Takes O(n) messages and bytes at rank 0 with n workers, and O(n) bytes at each worker that does
    not know the addresses; otherwise O(1).

    Args:
        cluster: The cluster. If it has `addresses`, they must be the same on all workers. Otherwise
            each worker chooses a free port on the interface from which it reaches `master`.
        seconds: Maximum time to wait for the other workers.
        gpus: Identifiers of the GPUs that this worker sees or requests.
        share_gpus: Whether several workers may use the same GPU; rank 0's value is used.

    Raises:
        ClusterError: Workers are missing, have the same rank or different lists of workers, or
            cannot listen at their address; or the GPUs cannot be divided.
    """
    return _run(meeting(cluster, seconds, gpus, share_gpus))


async def meeting(
    cluster: Cluster, seconds: float, gpus: Sequence[str] = (), share_gpus: bool = False
) -> Meeting:
    """The coroutine of `meet`."""
    digest = hashlib.sha256("\n".join(cluster.addresses).encode()).hexdigest()
    me = _Worker(
        rank=cluster.rank,
        size=cluster.size,
        cluster=digest,
        address=cluster.address,
        gpus=list(gpus),
    )
    address = cluster.addresses[0] if cluster.addresses else cluster.master
    networks.check_loopback(split(address)[0])
    if cluster.rank == 0:
        return await _Rank0(cluster, address, me, seconds, share_gpus).run()
    if cluster.addresses:
        try:
            check_free(cluster.address)
        except ClusterError as error:  # reported to all workers through rank 0
            me = me.model_copy(update={"problem": str(error)})
    # Longer than rank 0, which sends the list of missing workers.
    return await _join(address, me, seconds + _MESSAGE_SECONDS, cluster.addresses)


class _Rank0:
    """Rank 0's side of the rendezvous."""

    def __init__(
        self, cluster: Cluster, place: str, me: _Worker, seconds: float, share_gpus: bool = False
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
        """Waits for all workers, sends the reply to them, and returns the result."""
        # The other workers have reached rank 0 by this host name.
        with _reserve_address(self._me, split(self._place)[0]) as address:
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
                f"Rank {', '.join(missing[:20])}{more} of {self._size} did not connect to rank 0 "
                f"at {self._place} within {self._seconds:.0f} s. Check whether it was started, "
                f"can reach that address and has the same {messages.SECRET}."
            )
        server.close()  # so that TensorFlow can listen at this port
        divided: list[list[int]] = []
        if not self._problem:
            try:
                claims = [self._workers[rank].gpus for rank in range(self._size)]
                divided = gpus_of_workers.divide(claims, self._share_gpus)
            except ClusterError as error:
                self._problem = str(error)
        addresses = [self._workers[rank].address for rank in sorted(self._workers)]

        def reply(rank: int) -> dict[str, Any]:
            gpus = divided[rank] if divided else []
            return {"problem": self._problem, "gpus": gpus, **self._source(rank, addresses)}

        await asyncio.gather(
            *(
                _send_last(reader, writer, session.sign(reply(rank)))
                for rank, reader, writer, session in self._connections
            )
        )
        _check(self._problem)
        return Meeting(tuple(addresses), divided[0])

    def _source(self, rank: int, addresses: list[str]) -> dict[str, Any]:
        """Returns the addresses, or where to fetch them, for a worker that does not know them."""
        if self._problem or self._are_known:
            return {}
        parent = messages.parent_of(rank)
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
                await self._check_for_duplicate()
            reason = os.strerror(error.errno or 0)  # asyncio's message contains 0.0.0.0
            raise ClusterError(
                f"Rank 0 cannot listen at {self._place} ({reason}). Stop the process that listens "
                "there, or choose another port."
            ) from None

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Receives one worker's message."""
        worker = None
        session = await messages.greet(writer, self._key)
        with contextlib.suppress(OSError, ValidationError):
            async with asyncio.timeout(_MESSAGE_SECONDS):
                message = await messages.receive(reader, session)
            worker = _Worker.model_validate(message)
        if worker is None:
            writer.close()  # a port scanner, or a worker of another job
            return
        rank = worker.rank
        self._connections.append((rank, reader, writer, session))
        if (worker.size, worker.cluster) != (self._me.size, self._me.cluster) or rank >= self._size:
            self._problem = (
                f"Rank {rank} and rank 0 have different lists of workers ({worker.size} and "
                f"{self._size} workers). Pass the same addresses to all workers, in the same order."
            )
        elif rank in self._workers:
            self._problem = (
                f"Two workers have rank {rank}. Set a different rank or index for each worker."
            )
        elif worker.problem:
            self._problem = f"Rank {rank}: {messages.printable(worker.problem, 2000)}"
        else:
            self._workers[rank] = worker
        if self._problem or len(self._workers) == self._size:
            self._complete.set()

    async def _check_for_duplicate(self) -> None:
        """Raises an error on both workers if another rank 0 listens at the address."""
        try:
            await _join(self._place, self._me, _MESSAGE_SECONDS, ())
        except ClusterError as error:
            if "Two workers" in str(error):
                raise


async def _join(place: str, me: _Worker, seconds: float, known: tuple[str, ...]) -> Meeting:
    """Connects to rank 0, with retries until it listens, and returns its reply.

    Args:
        place: `"host:port"` of rank 0.
        me: This worker. An empty address is replaced by a new one.
        seconds: Time limit.
        known: The addresses of all workers, if this worker knows them.

    Raises:
        ClusterError: Rank 0 does not reply in time, or reports a problem.
    """
    reason, was_reached = "no reply", False
    try:
        async with asyncio.timeout(seconds):
            while True:
                try:
                    return await _try_to_join(place, me, known)
                except (
                    OSError
                ) as error:  # rank 0 does not listen yet, or its name does not resolve yet
                    is_reached = error.errno is None  # raised by `_exchange`, not by the network
                    if is_reached or not was_reached:
                        reason = error.strerror or str(error)
                    was_reached = was_reached or is_reached
                await asyncio.sleep(_RETRY_SECONDS)
    except TimeoutError:
        raise ClusterError(
            f"Rank {me.rank} timed out after waiting {seconds:.0f} s for rank 0 at {place} "
            f"({reason}). Check whether it was started, and whether this host can reach that "
            "address."
        ) from None


async def _try_to_join(place: str, me: _Worker, known: tuple[str, ...]) -> Meeting:
    """Connects to rank 0 once.

    Raises:
        OSError: Rank 0 does not listen, or closes the connection.
        ClusterError: Rank 0 reports a problem, or the addresses do not arrive.
    """
    host, port = split(place)
    reader, writer = await asyncio.open_connection(host, port, limit=messages.LIMIT)
    local = writer.get_extra_info("sockname")[0]
    # Reserve the port until all workers have one, so that workers on one host get different ports.
    with _reserve_address(me, local) as address:
        async with messages.Relay(me.rank, 0 if known else me.size, local) as children:
            places = {"address": address, "relay": children.address}
            answer = await _exchange(reader, writer, me.model_copy(update=places))
            _check(str(answer["problem"]))
            if known:
                return Meeting(known, answer["gpus"])
            members: Mapping[str, Any] = answer
            if "addresses" not in answer:
                members = await messages.fetch(answer["relay"], me.rank)
            await children.pass_on({"addresses": members["addresses"]})
            return Meeting(tuple(members["addresses"]), answer["gpus"])


@contextlib.contextmanager
def _reserve_address(me: _Worker, host: str) -> Iterator[str]:
    """Yields a worker's known address, or one with a free port, reserved within the block."""
    if me.address:
        yield me.address
        return
    with reserved_ports(1) as (port,):
        yield joined(host, port)


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, me: _Worker
) -> Mapping[str, Any]:
    """Sends this worker's message, and returns rank 0's reply."""
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
            f"it has ended or belongs to another job; check that {messages.SECRET} is the same"
        )
    return answer


def _check(problem: str) -> None:
    if problem:
        raise ClusterError(messages.printable(problem, 4000))


async def _send_last(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: bytes
) -> None:
    """Sends the reply to a worker, if it is still connected."""
    writer.write(line)
    with contextlib.suppress(OSError):
        async with asyncio.timeout(_MESSAGE_SECONDS):
            # The side that closes first blocks its port for a while, which must not be rank 0's
            # port.
            await reader.read()
    writer.close()


def _run(coroutine: Coroutine[Any, Any, Meeting]) -> Meeting:
    """Runs a coroutine, in another thread if this one has an event loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


def meet_over_mpi(cluster: Cluster, gpus: Sequence[str], share_gpus: bool) -> Meeting:
    """Exchanges addresses with an MPI all-gather. The ports are currently free, but not reserved.

    Raises:
        ClusterError: mpi4py is missing or uses a different MPI than mpirun; or the GPUs cannot be
            divided.
    """
    try:
        mpi = load_mpi()
    except (ImportError, RuntimeError) as error:
        raise ClusterError(
            f"{cluster.source} does not provide the workers' addresses, and mpi4py, which "
            f"exchanges them, is not usable ({' '.join(str(error).split())[:100]}). Run pip "
            "install mpi4py, or set TF_CONFIG."
        ) from None
    was_initialized = mpi.Is_initialized()
    if not was_initialized:
        mpi.Init()
    world = mpi.COMM_WORLD
    if (world.rank, world.size) != (cluster.rank, cluster.size):
        raise ClusterError(
            f"{cluster.source} has rank {cluster.rank} of {cluster.size}, but mpi4py's library has "
            f"{world.rank} of {world.size} ({mpi.get_vendor()[0]}): "
            "Use the mpirun of the MPI that mpi4py loads."
        )
    # Reserve the port until all workers have one, so that workers on one host get different ports.
    with reserved_ports(1) as (port,):
        gathered = world.allgather((networks.this_host(), port, tuple(gpus)))
    if not was_initialized:
        # Finalize now. At exit, it would wait for ranks that have failed.
        mpi.Finalize()
    hosts = networks.reachable([host for host, _, _ in gathered])
    addresses = tuple(
        joined(host, port) for host, (_, port, _) in zip(hosts, gathered, strict=True)
    )
    divided = gpus_of_workers.divide([claim for _, _, claim in gathered], share_gpus)
    return Meeting(addresses, divided[cluster.rank])


def load_mpi() -> ModuleType:
    """Imports mpi4py's MPI without initializing it.

    Raises:
        ImportError: mpi4py is not installed.
        RuntimeError: mpi4py finds no MPI library.
    """
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    return MPI
