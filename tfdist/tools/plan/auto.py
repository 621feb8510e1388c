"""`tfdist plan auto`: searches for the fastest layout that fits, with what the planner predicts."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json as json_format
import math
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jsonargparse import ArgumentParser
from jsonargparse.typing import NonNegativeFloat, PositiveFloat, PositiveInt

from tfdist import cluster
from tfdist.config import TrainConfig
from tfdist.console import folders, tables, units
from tfdist.errors import ConfigurationError, UnsupportedModelError
from tfdist.tools.plan import cards as cards_table
from tfdist.tools.plan import network as networks
from tfdist.tools.plan.cards import Card
from tfdist.tools.plan.exchange import PAYLOAD, Link, Profile, Wires, step

if TYPE_CHECKING:
    from tfdist.tools.plan.devices import ReplicatedStep

DESCRIPTION = "chooses strategy, mesh, accumulation, remat and offload for your cards"

#: Fractions of a card's published speeds that training reaches (Kaplan et al. 2020 and Narayanan et
#: al. 2021 report 40 to 52 % of the peak of matrix products).
_OF_FLOPS, _OF_BANDWIDTH = 0.45, 0.8
#: Bytes per second between a card and its host: PCIe 4.0, of whose 32 GB/s half is reached.
_TO_HOST = 16e9
#: Memory that TensorFlow leaves to CUDA on each card; `plan memory` has the source.
RESERVE = 1800 * 2**20
_MOST_ROUNDS = 64
#: Buckets of gathered weights that `sharded` keeps at a time, at least of the largest weight.
_GATHERED = 3
#: The default of `--micro-batches`.
_MICRO_BATCHES = 4
#: Seconds that each micro-batch on a stage takes in addition (docs/performance/memory.md).
_PER_MICRO_BATCH = 0.7e-3
#: Imbalance of the stages of a pipeline.
_LARGEST_STAGE = 1.2
_BEST = 5


class Cluster(NamedTuple):
    """The machines.

    Attributes:
        card: One card.
        per_host: Cards of a host.
        hosts: Number of hosts.
        link: The link of each host.
        example_seconds: Compute time of an example, for a card of unknown speed.
    """

    card: Card
    per_host: int
    hosts: int
    link: Link
    example_seconds: float = 0.0

    @property
    def room(self) -> float:
        """Bytes of a card that are available for tensors."""
        return self.card.memory - RESERVE


class Layout(NamedTuple):
    """A way to train: `num_cards` cards of each of `num_hosts` hosts.

    What is recomputed, `remat`, is "offload" where activations are on the host instead.
    """

    strategy: str
    num_cards: int
    num_hosts: int
    accumulate: int = 1
    remat: str = "none"
    shard: str = ""
    offload: str = "none"

    @property
    def name(self) -> str:
        """The strategy with what it shards."""
        return f"{self.strategy} {self.shard}".strip()

    def options(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the options of the strategy and of the trainer that differ from the defaults."""
        of_strategy: dict[str, Any] = {"shard": self.shard, "offload": self.offload}
        of_trainer: dict[str, Any] = {"accumulate": self.accumulate, "remat": self.remat}
        if self.remat == "offload":
            of_trainer |= {"remat": "none", "offload_activations": True}
        defaults = ("", "none", 1)
        of_strategy, of_trainer = (
            {name: value for name, value in one.items() if value is True or value not in defaults}
            for one in (of_strategy, of_trainer)
        )
        return of_strategy, of_trainer

    def flags(self) -> list[str]:
        """Returns the flags of the training command."""
        axis = {"sharded": "shard", "pipeline": "pipeline"}.get(self.strategy)
        given = ["--strategy", self.strategy]
        if self.strategy != "one_device":
            given += ["--devices", str(self.num_cards)]
        if axis and self.num_hosts > 1:
            given = ["--mesh", f"data={self.num_hosts},{axis}={self.num_cards}"]
        of_strategy, of_trainer = self.options()
        for name, value in (of_strategy | of_trainer).items():
            given += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        return given


class Choice(NamedTuple):
    """A layout with what it takes: bytes of a card, and seconds of a step."""

    layout: Layout
    rows: int
    num_bytes: float
    seconds: float

    @property
    def cards(self) -> int:
        """Number of cards."""
        return self.layout.num_cards * self.layout.num_hosts


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    networks.add_plan_arguments(parser, networks.OF_GLOBAL_BATCH, link="--link")
    parser.add_argument(
        "--cards", required=True, metavar="NxCARD",
        help="cards of a host, by memory or name: 2x24GB, 8xH100",
    )  # fmt: skip
    parser.add_argument("--hosts", type=PositiveInt, default=1, metavar="N", help="hosts")
    parser.add_argument(
        "--examples", type=PositiveFloat, default=1e6, metavar="N", help="examples of the training"
    )
    parser.add_argument(
        "--price", type=NonNegativeFloat, metavar="DOLLARS",
        help="price of a card for an hour (default: of the table of cards)",
    )  # fmt: skip
    parser.add_argument(
        "--example-ms", type=PositiveFloat, metavar="N",
        help="compute time of an example on a card that is not in the table (default: measured on "
        "this machine)",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write the best layout to this file")


def run(
    cards: str,
    hosts: int,
    link: str,
    latency: str,
    batch_size: int | None,
    examples: float,
    price: float | None,
    example_ms: float | None,
    table: str | None,
    json: str | None,
    **network: Any,
) -> None:
    """Prints the best layouts, and why others are not among them. The arguments are the flags.

    Raises:
        ConfigurationError: A flag has an invalid value, or nothing fits.
    """
    tables.check_path(table, ".md", ".csv")
    per_host, card = cards_table.parsed(cards)
    outer = networks.link("--link", link, "--latency", latency, PAYLOAD)
    workload = networks.from_flags(**network)
    batch = networks.global_batch(batch_size, workload)
    if not card.flops and example_ms is None:
        from tfdist.tools.plan import step_profile

        example_ms = 1e3 * step_profile.measure(workload, 8).seconds / 8
        tables.text(
            f"The speed of {cards} is unknown: an example takes {example_ms:.3g} ms on this "
            "machine. Name a card, or --example-ms."
        )
    cluster = Cluster(card, per_host, hosts, outer, (example_ms or 0.0) / 1e3)
    fitting, reasons = search(workload, cluster, batch)
    if not fitting:
        raise ConfigurationError(
            f"Nothing fits {per_host * hosts} cards of {units.format_bytes(card.memory)}:\n"
            + "\n".join(f"  {name}: {reason}" for name, reason in reasons.items())
        )
    price = card.price if price is None else price
    _show(fitting, reasons, batch, examples, price, table)
    print(command(workload, fitting[0].layout, batch, network))
    if json:
        best = fitting[0]
        planned = units.format_bytes(best.num_bytes)
        planned += f", {1e3 * best.seconds:.3g} ms a step" if card.flops else ""
        layout = {"layout": best.layout._asdict(), "planned": planned}
        Path(json).write_text(json_format.dumps(layout))


def applied(config: TrainConfig) -> tuple[TrainConfig, str]:
    """Returns the configuration with the best layout for the devices of this host, and its plan.

    It is searched in another process, because planning initializes TensorFlow.

    Raises:
        ConfigurationError: The user chose a layout, too, or nothing fits.
    """
    chosen = "accumulate devices mesh offload offload_activations remat shard strategy"
    for name in chosen.split():
        default = TrainConfig.model_fields[name].get_default(call_default_factory=True)
        if getattr(config, name) != default:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigurationError(f"--auto chooses {flag} itself. Remove one of the flags.")
    if cluster.discover().size > 1:
        raise ConfigurationError(
            "--auto chooses for the devices of one process. Use tfdist plan auto --hosts N."
        )
    given = ["--cards", cards_table.of_this_host(), "--batch-size", str(config.batch_size)]
    given += ["--optimizer", config.optimizer, "--precision", config.precision]
    given += ["--model", config.model] if config.model else []
    for name, value in config.set.items():
        given += ["--set", f"{name}={json_format.dumps(value)}"]
    with folders.temporary() as folder:
        file = Path(folder, "layout.json")
        line = [sys.executable, "-m", "tfdist.tools.plan", "auto", config.recipe, *given]
        # Where the speed is unknown, layouts are compared with each other only.
        line += ["--example-ms", "1", "--json", str(file)]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigurationError(f"--auto: {done.stderr.strip()[-2000:]}")
        chosen_layout = json_format.loads(file.read_text())
        layout = Layout(**chosen_layout["layout"])
    if config.verbose != 0:
        print(done.stdout)
    of_strategy, of_trainer = layout.options()
    several = None if layout.strategy == "one_device" else layout.num_cards
    fields = {"strategy": layout.strategy, "devices": several, "auto": False}
    configured = config.model_copy(update=fields | of_strategy | of_trainer)
    return configured, chosen_layout["planned"]


def search(
    workload: networks.Workload, cluster: Cluster, batch: int
) -> tuple[list[Choice], dict[str, str]]:
    """Returns the layouts that fit, the fastest one first, and why each other kind falls out.

    Args:
        workload: What is trained.
        cluster: The machines.
        batch: Global batch size, which all layouts keep.

    Raises:
        UnsupportedModelError: The memory of the model cannot be predicted.
    """
    from tfdist.tools.plan.devices import ReplicatedStep

    steps = {"none": ReplicatedStep(workload)}
    with contextlib.suppress(UnsupportedModelError):  # of a model that cannot be recomputed
        steps["all"] = ReplicatedStep(workload, remat="all")
    with contextlib.suppress(UnsupportedModelError, ConfigurationError):  # with a custom step
        steps["offload"] = ReplicatedStep(workload, offload_activations=True)
    most = steps["none"].peak(batch)
    steps = {name: one for name, one in steps.items() if name == "none" or one.peak(batch) < most}
    estimate = Estimate(steps, cluster, batch, "16" in (workload.precision or ""))
    choices = [estimate.choice(layout) for layout in _layouts(cluster, batch, list(steps))]
    fitting = sorted(
        (one for one in choices if one.num_bytes <= cluster.room),
        key=lambda one: (one.seconds, one.cards),
    )
    reasons = {}
    for name, group in itertools.groupby(choices, key=lambda one: one.layout.name):
        every = list(group)
        fits = [one for one in fitting if one.layout.name == name]
        if fits and fits[0].seconds > fitting[0].seconds:
            reasons[name] = f"{fits[0].seconds / fitting[0].seconds:.2f} times the time of the best"
        elif not fits:
            least = min(every, key=lambda one: one.num_bytes)
            reasons[name] = (
                f"needs {units.format_bytes(least.num_bytes)} of a card at least, which has "
                f"{units.format_bytes(max(0, cluster.room))} for tensors"
            )
    return fitting, reasons


class Estimate:
    """Predicts memory and time of layouts from the step of one device.

    Args:
        steps: The step, by what is recomputed.
        cluster: The machines.
        batch: Global batch size.
        half: Whether matrix products are in 16 bits.
    """

    def __init__(
        self, steps: dict[str, ReplicatedStep], cluster: Cluster, batch: int, half: bool
    ) -> None:
        self._steps, self._cluster, self._batch = steps, cluster, batch
        # On a card of unknown speed, steps are compared by what another one would take.
        card = cluster.card if cluster.card.flops else cards_table.CARDS["A10G"]
        flops = _OF_FLOPS * (card.half_flops if half else card.flops)
        self._computing = functools.cache(
            lambda remat, rows: steps[remat].seconds(rows, flops, _OF_BANDWIDTH * card.bandwidth)
        )

    def choice(self, layout: Layout) -> Choice:
        """Returns a layout with its memory and its time."""
        replicas = layout.num_hosts * (1 if layout.strategy == "pipeline" else layout.num_cards)
        rows = math.ceil(self._batch / (replicas * layout.accumulate))
        return Choice(layout, rows, self._memory(layout, rows), self._seconds(layout, rows))

    def _memory(self, layout: Layout, rows: int) -> float:
        step, n = self._steps[layout.remat], layout.num_cards
        weights, gradients, optimizer = step.weights, step.gradients, float(step.optimizer)
        activations = max(0, step.peak(rows) - weights - gradients - optimizer)
        rounds = gradients if layout.accumulate > 1 else 0
        if layout.strategy == "pipeline":
            state = weights + gradients + optimizer + rounds
            return (state + activations) / n * _LARGEST_STAGE
        if layout.strategy == "sharded":
            optimizer = 0 if layout.offload == "optimizer" else optimizer / n
            if layout.shard == "parameters":
                gathered = min(weights, _GATHERED * step.largest_weight)
                return (weights + gradients + rounds) / n + optimizer + gathered + activations
            return weights + gradients + rounds + optimizer + activations
        state = weights + gradients + optimizer + rounds
        reduced = gradients if layout.num_cards * layout.num_hosts > 1 else 0
        return state + max(activations, reduced)

    def _seconds(self, layout: Layout, rows: int) -> float:
        cluster, step_of_replica = self._cluster, self._steps[layout.remat]
        computing = self._computing(layout.remat, rows)
        if not cluster.card.flops:
            computing *= rows * cluster.example_seconds / self._computing("none", rows)
        if layout.remat == "offload":  # copies overlap with computing
            computing = max(computing, 2 * step_of_replica.offloaded(rows) / _TO_HOST)
        computing *= layout.accumulate
        n, hosts, gradients = layout.num_cards, layout.num_hosts, step_of_replica.gradients
        if layout.strategy == "pipeline":
            turns = _MICRO_BATCHES + n - 1
            computing *= turns / _MICRO_BATCHES / n * _LARGEST_STAGE
            computing += layout.accumulate * turns * _PER_MICRO_BATCH
        wires = Wires(cluster.link, Link(cluster.card.inner, 5e-6), per_host=n)
        total = computing
        if layout.strategy == "sharded" and n > 1:
            kind = f"sharded_{layout.shard}"
            within = step(kind, Profile(0.0, gradients), n, wires)
            total += within.seconds if within else 0.0
        elif layout.strategy in ("mirrored", "multi_worker") and n * hosts > 1:
            over_all = step("ring", Profile(0.0, gradients), n * hosts, wires)
            return total + (over_all.seconds if over_all else 0.0)
        if hosts > 1:  # all cards of a host send their parts over its link
            between = step("ring", Profile(0.0, gradients), hosts, wires._replace(per_host=1))
            total += between.seconds if between else 0.0
        if layout.offload == "optimizer":
            total += 2 * step_of_replica.gradients / n / _TO_HOST
        return total


def command(
    workload: networks.Workload, layout: Layout, batch: int, network: dict[str, Any]
) -> str:
    """Returns the command line that trains a recipe so, or the arguments of `Trainer`."""
    if not getattr(workload, "is_recipe", False):
        of_strategy, of_trainer = (
            [f"{name}={value!r}" for name, value in one.items()] for one in layout.options()
        )
        arguments = [repr(layout.strategy), str(layout.num_cards), *of_strategy]
        strategy = f"tfdist.strategies.create({', '.join(arguments)})"
        trainer = f"tfdist.Trainer({', '.join(['build_model', strategy, *of_trainer])})"
        return f"{trainer}.fit(x, y, batch_size={batch})"
    words = ["python", "-m", "tfdist.train", "--recipe", workload.model, "--batch-size", str(batch)]
    for name in ("model", "optimizer", "precision"):
        words += [f"--{name}", network[name]] if network.get(name) else []
    for setting in network.get("set") or ():
        words += ["--set", setting]
    words += layout.flags()
    if layout.num_hosts > 1:
        hosts = ",".join(f"HOST{n}" for n in range(1, layout.num_hosts + 1))
        words = ["python", "-m", "tfdist.launch", "--hosts", hosts, "--", *words]
    return shlex.join(words)


def _layouts(cluster: Cluster, batch: int, remats: Sequence[str]) -> Iterator[Layout]:
    """Yields all layouts that keep the global batch, those of a name after each other."""
    spans = {(1, 1), (cluster.per_host, 1), (cluster.per_host, cluster.hosts)}
    several = [span for span in sorted(spans) if math.prod(span) > 1]
    bases: list[Layout] = [Layout("one_device", 1, 1)]
    names = {1: "mirrored"}
    bases += [Layout(names.get(hosts, "multi_worker"), n, hosts) for n, hosts in several]
    split = [span for span in several if span[0] > 1]
    for shard, offload in itertools.product(("optimizer", "parameters"), ("none", "optimizer")):
        bases += [Layout("sharded", *span, shard=shard, offload=offload) for span in split]
    bases += [Layout("pipeline", *span) for span in split]
    for base in bases:
        for remat, power in itertools.product(remats, range(int(math.log2(_MOST_ROUNDS)) + 1)):
            replicas = base.num_hosts * (1 if base.strategy == "pipeline" else base.num_cards)
            is_known = remat != "offload" or base.strategy != "pipeline"
            if is_known and 2**power * replicas <= batch:
                yield base._replace(accumulate=2**power, remat=remat)


def of_each_kind(fitting: Sequence[Choice]) -> list[Choice]:
    """Returns the fastest choice of each layout: more rounds of the same one are only slower."""
    kinds: dict[Layout, Choice] = {}
    for one in fitting:
        kinds.setdefault(one.layout._replace(accumulate=1), one)
    return list(kinds.values())


def _show(
    fitting: Sequence[Choice], reasons: dict[str, str], batch: int, examples: float, price: float,
    path: str | None,
) -> None:  # fmt: skip
    """Prints the best choices, one for each way to save memory, and why others fall out."""
    header = ["strategy", "cards", "rows", "accumulate", "remat", "offload", "memory",
              "ms", "hours", "dollars"]  # fmt: skip
    best = of_each_kind(fitting)[:_BEST]

    def hours_of(one: Choice) -> float:
        return one.seconds * examples / batch / 3600

    rows = [
        [one.layout.name, str(one.cards), str(one.rows), str(one.layout.accumulate),
         one.layout.remat, one.layout.offload, units.format_bytes(one.num_bytes),
         f"{1e3 * one.seconds:.3g}", f"{hours_of(one):.3g}",
         f"{hours_of(one) * one.cards * price:.3g}" if price else "unknown"]
        for one in best
    ]  # fmt: skip
    title = (
        f"global batch of {batch}, {examples:g} examples (rows of a card and round, ms per step)"
    )
    tables.numbers(header, rows, title=title)
    shown = {one.layout.name for one in best}
    others = [(name, reason) for name, reason in reasons.items() if name not in shown]
    if others:
        tables.facts(others)
    if path:
        tables.write_file(Path(path), header, rows)
